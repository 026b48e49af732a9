/* Norms in training: a part of `native.c`.
 *
 * The bodies of the autograd function of `core/ops/batch_norm.py`, and a module's call of it. */

/* How a norm's rows and channels are dealt out, as Python's `cut_of` says. */
typedef struct {
  PyObject *cut, *tile, *index, *rows, *channels;
  long long parts, n_channels;
  unsigned programs, blocks;
} Cut;

static Cut cut_for(Scope *s, PyObject *spec, PyObject *x, PyObject *aligned) {
  Cut c = {0};
  long long rows = 0;
  refuse_unless(s, Py_IS_TYPE(spec, (PyTypeObject *)g_NormSpec) &&
                       plain_rows(s, x, &rows, &c.n_channels) && rows > 1 &&
                       truth(s, SLOT(spec, NormSpec, addressed)));
  if (s->state != GOES_ON) return c;
  c.rows = hold(s, PyLong_FromLongLong(rows));
  c.channels = c.rows ? hold(s, PyLong_FromLongLong(c.n_channels)) : NULL;
  PyObject *units = c.channels ? SLOT(spec, NormSpec, units) : NULL;
  if (!units) return c;
  c.cut = hold(s, PyObject_CallFunctionObjArgs(g_cut_of, c.rows, c.channels, aligned, units, NULL));
  c.index = GET(SLOT(spec, NormSpec, device), Device, index);
  refuse_unless(s, c.cut && PyTuple_Check(c.cut) && PyTuple_GET_SIZE(c.cut) == 4);
  if (s->state != GOES_ON) return c;
  c.parts = number(s, FIELD(c.cut, Cut, parts)), c.tile = FIELD(c.cut, Cut, tile);
  c.programs = (unsigned)number(s, FIELD(c.cut, Cut, programs));
  c.blocks = (unsigned)number(s, FIELD(c.cut, Cut, blocks));
  may_launch(s, c.index);
  return c;
}

static Pass norm_pass(Scope *s, PyObject *kernel, Cut *c, PyObject *number, PyObject *aligned,
                      unsigned programs) {
  PyObject *key = s->state == GOES_ON ? hold(s, PyTuple_Pack(3, number, c->tile, aligned)) : NULL;
  Pass pass = pass_of(s, kernel, c->index, key);
  pass.grid[0] = programs, pass.grid[1] = c->blocks;
  return pass;
}

/* `_BatchNorm.forward` of all rows(NormSpec, x, gain, beta, running mean and variance, number of
 * batches, momentum, eps, relu): (y, memory). None for a vector that is not there. */
static PyObject *norm_forward(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  SCOPE(s);
  if (count != 10 || declined()) Py_RETURN_NOTIMPLEMENTED;
  PyObject *spec = args[0], *x = args[1];
  uint64_t x_at = starts_at(s, x);
  PyObject *aligned = x_at & 15 ? Py_False : Py_True;
  Cut c = cut_for(s, spec, x, aligned);
  Pass sums = norm_pass(s, g_partials_kernel, &c, SLOT(spec, NormSpec, rows_key), aligned,
                        (unsigned)c.parts);
  Pass apply =
      norm_pass(s, g_apply_kernel, &c, SLOT(spec, NormSpec, vectors_key), aligned, c.programs);
  PyObject *unread = s->state == GOES_ON
                         ? hold(s, PyObject_CallOneArg(g_unread, SLOT(spec, NormSpec, device)))
                         : NULL;
  PyObject *y = empty_like(s, x, NULL), *size = NULL;
  if (y) size = hold(s, PyLong_FromLongLong((2 + 2 * c.parts) * c.n_channels));
  PyObject *memory = new_fp32(s, x, size, NULL),
           *stream = stream_on(s, SLOT(spec, NormSpec, device));
  uint64_t at = starts_at(s, memory), unread_at = starts_at(s, unread);
  add_cell(s, &sums, x_at), add_cell(s, &sums, unread_at), add_cell(s, &sums, at);
  add_value(s, &sums, c.rows), add_value(s, &sums, c.channels), add_cell(s, &sums, 0);
  add_cell(s, &apply, x_at), add_cell(s, &apply, starts_at(s, y));
  for (int i = 2; i < 7; i++) add_cell(s, &apply, args[i] == Py_None ? at : starts_at(s, args[i]));
  add_cell(s, &apply, unread_at), add_cell(s, &apply, at);
  add_value(s, &apply, c.rows), add_value(s, &apply, c.channels);
  add_cell(s, &apply, (uint64_t)c.parts), add_cell(s, &apply, 0);
  add_values(s, &apply, SLOT(spec, NormSpec, present));
  add_cell(s, &apply, (uint64_t)truth(s, args[9]));
  add_value(s, &apply, args[7]), add_value(s, &apply, args[8]);
  refuse_unless(s, complete(s, &sums) && complete(s, &apply));
  run_pass(s, &sums, stream), run_pass(s, &apply, stream);
  return ended(s, s->state == GOES_ON ? hold(s, PyTuple_Pack(2, y, memory)) : NULL);
}

/* `_BatchNorm.backward` of all rows(NormSpec, x, dy, gain, beta, memory, relu): (dx, d gain, d
 * beta), None for a vector that is not there. */
static PyObject *norm_backward(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  SCOPE(s);
  if (count != 7 || declined()) Py_RETURN_NOTIMPLEMENTED;
  PyObject *spec = args[0], *x = args[1], *dy = args[2], *memory = args[5];
  PyObject *made[3] = {0}; /* dx and those of the vectors */
  long long sizes[2];
  uint64_t x_at = starts_at(s, x), dy_at = starts_at(s, dy), at = starts_at(s, memory);
  refuse_unless(s, !((x_at | dy_at) & 15) && plain_rows(s, dy, &sizes[0], &sizes[1]));
  Cut c = cut_for(s, spec, x, Py_True);
  PyObject *key = SLOT(spec, NormSpec, grads_key);
  PyObject *aligned = s->state == GOES_ON ? hold(s, PyTuple_Pack(2, Py_True, Py_True)) : NULL;
  Pass sums = norm_pass(s, g_grad_partials_kernel, &c, key, aligned, (unsigned)c.parts);
  Pass apply = norm_pass(s, g_dx_kernel, &c, key, aligned, c.programs);
  PyObject *unread = s->state == GOES_ON
                         ? hold(s, PyObject_CallOneArg(g_unread, SLOT(spec, NormSpec, device)))
                         : NULL;
  made[0] = empty_like(s, x, NULL);
  for (int i = 1; i < 3; i++)
    made[i] = args[2 + i] == Py_None ? Py_None : empty_like(s, args[2 + i], NULL);
  PyObject *stream = stream_on(s, SLOT(spec, NormSpec, device));
  if (s->state != GOES_ON) return ended(s, NULL);
  uint64_t unread_at = starts_at(s, unread), vectors[4]; /* gain, beta, and their gradients */
  for (int i = 0; i < 2; i++) {
    vectors[i] = args[3 + i] == Py_None ? at : starts_at(s, args[3 + i]);
    vectors[2 + i] = made[1 + i] == Py_None ? 0 : starts_at(s, made[1 + i]);
  }
  /* What is not there is not written, and of the other's dtype. */
  if (!vectors[2]) vectors[2] = vectors[3] ? vectors[3] : at;
  if (!vectors[3]) vectors[3] = vectors[2];
  add_cell(s, &sums, x_at), add_cell(s, &sums, dy_at);
  add_cell(s, &apply, x_at), add_cell(s, &apply, dy_at), add_cell(s, &apply, starts_at(s, made[0]));
  for (int i = 0; i < 2; i++) add_cell(s, &sums, vectors[i]);
  for (int i = 0; i < 4; i++) add_cell(s, &apply, vectors[i]);
  PyObject *present = SLOT(spec, NormSpec, present);
  for (Pass *pass = &sums;; pass = &apply) {
    add_cell(s, pass, unread_at), add_cell(s, pass, at);
    add_value(s, pass, c.rows), add_value(s, pass, c.channels);
    if (pass == &apply) add_cell(s, pass, (uint64_t)c.parts);
    add_cell(s, pass, 0);
    for (int i = 0; i < 2 && s->state == GOES_ON; i++)
      add_value(s, pass, PyTuple_GET_ITEM(present, i));
    add_cell(s, pass, (uint64_t)truth(s, args[6]));
    refuse_unless(s, complete(s, pass));
    if (pass == &apply) break;
  }
  run_pass(s, &sums, stream), run_pass(s, &apply, stream);
  return ended(s, s->state == GOES_ON ? hold(s, PyTuple_Pack(3, made[0], made[1], made[2])) : NULL);
}

/* `functorch`, forward gradients, modes, hooks of saved tensors, tracing: nobody watches or repeats
 * what is done (`trained_norms._usual`). */
static int nobody_watches(Scope *s, PyObject *parts) {
  PyObject *hooks = PyTuple_GET_ITEM(parts, 2);
  refuse_unless(s, hooks != Py_None);
  if (s->state != GOES_ON) return 0;
  PyObject *transforms = hold(s, PyObject_CallNoArgs(PyTuple_GET_ITEM(parts, 3)));
  PyObject *saved = hold(s, PyObject_CallOneArg(hooks, Py_False));
  return transforms == Py_None && saved == Py_None &&
         unset(s, s_torch_c__len_torch_function_stack) &&
         unset(s, s_torch_c__len_torch_dispatch_stack) &&
         !truth(s, asked(s, s_torch_c__get_tracing_state)) &&
         number(s, item(s, g_forward_ad, s_forward_ad__current_level)) < 0;
}

/* `batch_norm.batch_norm_training`(BatchNorm1d or a subclass whose forward that is, x, relu) over features of a
 * kind that has been met. */
static PyObject *trained_norm(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  SCOPE(s);
  if (count != 3 || declined()) Py_RETURN_NOTIMPLEMENTED;
  PyObject *norm = args[0], *x = args[1], *parts = item(s, g_calls, s_calls_norm_parts);
  refuse_unless(s, parts && PyTuple_CheckExact(parts) && PyTuple_GET_SIZE(parts) == 5);
  if (s->state != GOES_ON) return ended(s, NULL);
  PyObject *dict = GET(norm, Object, __dict__), *vectors[5] = {0};
  PyObject *parameters = item(s, dict, s_BatchNorm1d__parameters),
           *buffers = item(s, dict, s_BatchNorm1d__buffers);
  refuse_unless(s, parameters && buffers && PyDict_Check(parameters) && PyDict_Check(buffers) &&
                       PyDict_GET_SIZE(parameters) == 2 && PyDict_GET_SIZE(buffers) == 3);
  PyObject *momentum = item(s, dict, s_BatchNorm1d_momentum),
           *eps = item(s, dict, s_BatchNorm1d_eps);
  refuse_unless(s, item(s, dict, s_BatchNorm1d_training) == Py_True &&
                       item(s, dict, s_BatchNorm1d_track_running_stats) == Py_True && momentum &&
                       eps && PyFloat_CheckExact(momentum) && PyFloat_CheckExact(eps) &&
                       PyFloat_AS_DOUBLE(eps) > 0);
  vectors[0] = item(s, parameters, s_NormVectors_weight),
  vectors[1] = item(s, parameters, s_NormVectors_bias);
  vectors[2] = item(s, buffers, s_NormVectors_running_mean),
  vectors[3] = item(s, buffers, s_NormVectors_running_var);
  vectors[4] = item(s, buffers, s_NormVectors_num_batches_tracked);
  for (int i = 0; i < 5; i++) refuse_unless(s, vectors[i] && vectors[i] != Py_None);
  long long rows = 0, columns = 0;
  refuse_unless(s, Py_IS_TYPE(x, (PyTypeObject *)g_Tensor) && plain_rows(s, x, &rows, &columns) &&
                       rows > 1 && rows < (1ll << 31) - (1ll << 20) &&
                       !truth(s, CALL(x, Tensor, is_inference)));
  refuse_unless(s, nobody_watches(s, parts));
  if (s->state != GOES_ON) return ended(s, NULL);
  PyObject *kinds[] = {GET(x, Tensor, dtype), GET(x, Tensor, device)}, *key = NULL, *form = NULL;
  PyObject *width = hold(s, PyLong_FromLongLong(columns));
  if (s->state == GOES_ON) key = hold(s, PyTuple_Pack(3, kinds[0], kinds[1], width));
  form = item(s, PyTuple_GET_ITEM(parts, 0), key);
  refuse_unless(s, form && PyTuple_Check(form) && PyTuple_GET_SIZE(form) == 4);
  if (s->state != GOES_ON) return ended(s, NULL);
  refuse_unless(s, truth(s, FIELD(form, NormForm, optimized)) &&
                       equal(s, FIELD(form, NormForm, generation),
                             item(s, g_settings, s_settings_generation)));
  if (s->state == GOES_ON)
    refuse_unless(
        s, truth(s, hold(s, PyObject_Vectorcall(FIELD(form, NormForm, same), vectors, 5, NULL))));
  if (s->state != GOES_ON) return ended(s, NULL);
  hold(s, PyObject_CallOneArg(PyTuple_GET_ITEM(parts, 4), vectors[4]));
  PyObject *moved = hold(s, PyTuple_Pack(3, vectors[2], vectors[3], vectors[4])), *rest = NULL;
  if (s->state == GOES_ON)
    rest = hold(s, PyTuple_Pack(6, FIELD(form, NormForm, spec), moved, Py_None, momentum, eps,
                                truth(s, args[2]) ? Py_True : Py_False));
  PyObject *arguments[] = {x, vectors[0], vectors[1], rest};
  if (s->state != GOES_ON) return ended(s, NULL);
  return ended(s, hold(s, PyObject_Vectorcall(PyTuple_GET_ITEM(parts, 1), arguments, 4, NULL)));
}
