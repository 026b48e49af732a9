/* Convolutions with gradients: a part of `native.c`.
 *
 * The bodies of an autograd function. What it saves and returns is Python's, see
 * `core/conv/convolution.py`. */

/* ---- kernels by their variants --------------------------------------------------------------- */

typedef struct {
  Launcher *launcher;
  unsigned grid[3];
  int count; /* of the values so far */
  uint64_t cells[MOST_VALUES];
} Pass;

/* `Kernel.compiled`: the variant of a key, which is launched by address; refuses without one. */
static Pass pass_of(Scope *s, PyObject *kernel, PyObject *index, PyObject *key) {
  Pass pass = {.grid = {1, 1, 1}};
  PyObject *compiled = GET(kernel, Kernel, _compiled), *entry = NULL;
  PyObject *variant = compiled && index && key ? hold(s, PyTuple_Pack(2, index, key)) : NULL;
  if (!variant) return pass;
  if (PyDict_CheckExact(compiled))
    entry = item(s, compiled, variant);
  else /* of tests */
    entry = hold(s, PyObject_CallMethodObjArgs(compiled, s_Dict_get, variant, NULL));
  refuse_unless(s, entry && PyTuple_CheckExact(entry) && PyTuple_GET_SIZE(entry) == 3 &&
                       Py_IS_TYPE(PyTuple_GET_ITEM(entry, 0), &LauncherType));
  if (s->state == GOES_ON) pass.launcher = (Launcher *)PyTuple_GET_ITEM(entry, 0);
  return pass;
}

static void add_cell(Scope *s, Pass *pass, uint64_t cell) {
  if (s->state != GOES_ON) return;
  refuse_unless(s, pass->count < pass->launcher->count);
  if (s->state == GOES_ON) pass->cells[pass->count++] = cell;
}

static void add_value(Scope *s, Pass *pass, PyObject *value) {
  if (s->state != GOES_ON || !value) return;
  uint64_t cell = 0;
  refuse_unless(s, pass->count < pass->launcher->count);
  if (s->state == GOES_ON && !stored(pass->launcher->kinds[pass->count], value, &cell))
    s->state = RAISES;
  add_cell(s, pass, cell);
}

static void add_values(Scope *s, Pass *pass, PyObject *values) {
  refuse_unless(s, values && PyTuple_CheckExact(values));
  if (s->state != GOES_ON) return;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++)
    add_value(s, pass, PyTuple_GET_ITEM(values, i));
}

/* Whether a pass has all of its values, the kernel's constants left out. */
static int complete(Scope *s, Pass *pass) {
  if (s->state != GOES_ON) return 0;
  for (int i = pass->count; i < pass->launcher->count; i++)
    if (pass->launcher->kinds[i] != 'x') return 0;
  return 1;
}

static void run_pass(Scope *s, Pass *pass, PyObject *stream) {
  uint64_t on = s->state == GOES_ON ? PyLong_AsUnsignedLongLong(stream) : 0;
  if (s->state != GOES_ON) return;
  if (PyErr_Occurred() || !started(pass->launcher, pass->grid, on, pass->cells)) s->state = RAISES;
}

static uint64_t starts_at(Scope *s, PyObject *tensor) {
  return address_in(s, CALL(tensor, Tensor, data_ptr));
}

/* Features [rows, columns] that lie one after another, of the class of tensors. */
static int plain_rows(Scope *s, PyObject *x, long long *rows, long long *columns) {
  PyObject *shape = is_plain(x) ? GET(x, Tensor, shape) : NULL;
  if (!shape || PyTuple_GET_SIZE(shape) != 2) return 0;
  *rows = number(s, PyTuple_GET_ITEM(shape, 0)), *columns = number(s, PyTuple_GET_ITEM(shape, 1));
  return truth(s, CALL(x, Tensor, is_contiguous));
}

/* tensor.new_empty(rows, columns, dtype=fp32) */
static PyObject *new_fp32(Scope *s, PyObject *tensor, PyObject *rows, PyObject *columns) {
  if (s->state != GOES_ON || !rows || !columns) return NULL;
  PyObject *args[] = {tensor, rows, columns, g_float32};
  PyObject *names = hold(s, PyTuple_Pack(1, s_Tensor_dtype));
  if (!names) return NULL;
  return hold(s, PyObject_VectorcallMethod(s_Tensor_new_empty, args, 3, names));
}

static PyObject *empty_like(Scope *s, PyObject *tensor, PyObject *dtype) {
  if (s->state != GOES_ON) return NULL;
  PyObject *function = item(s, g_torch, s_torch_empty_like), *args[] = {tensor, dtype};
  PyObject *names = hold(s, PyTuple_Pack(1, s_Tensor_dtype));
  refuse_unless(s, function != NULL);
  return s->state == GOES_ON ? hold(s, PyObject_Vectorcall(function, args, 1, names)) : NULL;
}

/* ---- convolutions ---------------------------------------------------------------------------- */

/* The key of a plan, as `plan.find` makes it of a bias or no epilogue. */
static PyObject *plan_key(Scope *s, PyObject *x, PyObject *weight, PyObject *bias, PyObject *form,
                          PyObject *rulebook) {
  PyObject *end = Py_None;
  if (bias) {
    PyObject *dtype = GET(bias, Tensor, dtype), *device = GET(bias, Tensor, device);
    PyObject *shape = GET(bias, Tensor, shape), *stride = CALL(bias, Tensor, stride);
    if (s->state != GOES_ON) return NULL;
    end = hold(s, PyTuple_Pack(4, dtype, device, shape, stride));
  }
  PyObject *parts[] = {GET(x, Tensor, dtype),           GET(x, Tensor, device),
                       GET(weight, Tensor, dtype),      GET(weight, Tensor, device),
                       GET(weight, Tensor, shape),      CALL(weight, Tensor, stride),
                       GET(rulebook, Rulebook, regular)};
  if (s->state != GOES_ON) return NULL;
  return hold(s, PyTuple_Pack(9, parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], form,
                              end, parts[6]));
}

/* The launches of a GatherProduct, where they are known to this file. */
static Known *known_product(Scope *s, PyObject *product) {
  refuse_unless(s, product && Py_IS_TYPE(product, (PyTypeObject *)g_GatherProduct));
  PyObject *held = SLOT(product, GatherProduct, native);
  refuse_unless(s, held && Py_IS_TYPE(held, &KnownType));
  return s->state == GOES_ON ? (Known *)held : NULL;
}

/* `plan.run` of a plan that is known, with a bias or nothing behind the product(x, weight, bias,
 * KernelMap, form): (y, plan). */
static PyObject *run_plain(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  SCOPE(s);
  if (count != 5 || declined()) Py_RETURN_NOTIMPLEMENTED;
  PyObject *x = args[0], *weight = args[1], *bias = args[2] == Py_None ? NULL : args[2];
  PyObject *kmap = args[3], *form = args[4];
  refuse_unless(s, Py_IS_TYPE(kmap, (PyTypeObject *)g_KernelMap) && is_plain(weight) &&
                       (!bias || is_plain(bias)));
  refuse_unless(s, idle(s, g_override, s_override_inside) && idle(s, g_trace, s_trace_recorders));
  refuse_unless(s, unset(s, s_torch_c__len_torch_function_stack));
  PyObject *rulebook = GET(kmap, KernelMap, rulebook);
  int side = truth(s, GET(kmap, KernelMap, flipped));
  refuse_unless(
      s, equal(s, GET(g_plans, plans, generation), item(s, g_settings, s_settings_generation)));
  PyObject *plans = GET(g_plans, plans, plans), *key = NULL, *plan = NULL;
  if (s->state == GOES_ON) key = plan_key(s, x, weight, bias, form, rulebook);
  refuse_unless(s, plans && PyDict_CheckExact(plans));
  if (s->state == GOES_ON) plan = item(s, plans, key);
  refuse_unless(s, plan && Py_IS_TYPE(plan, (PyTypeObject *)g_ConvPlan));
  Known *known = known_product(s, SLOT(plan, ConvPlan, forward));
  long long rows = 0, columns = 0;
  refuse_unless(s, plain_rows(s, x, &rows, &columns));
  refuse_unless(s,
                SLOT(plan, ConvPlan, separate) == Py_False &&
                    columns == number(s, SLOT(plan, ConvPlan, columns_in)) &&
                    equal(s, GET(rulebook, Rulebook, n_offsets), SLOT(plan, ConvPlan, n_offsets)) &&
                    equal(s, GET(rulebook, Rulebook, device), GET(x, Tensor, device)));
  PyObject *n_rows = GET(rulebook, Rulebook, n_rows);
  refuse_unless(s, n_rows && rows == number(s, PyTuple_GET_ITEM(n_rows, 1 - side)));
  if (s->state != GOES_ON) return ended(s, NULL);
  PyObject *y = computed(s, known, x, weight, rulebook, side, bias, NULL);
  return ended(s, y ? hold(s, PyTuple_Pack(2, y, plan)) : NULL);
}

/* `WgradGemm.__call__`: 1 where it was launched, 0 where Python has to. */
static int launched_wgrad(Scope *s, PyObject *launch, PyObject *x, PyObject *dy, PyObject *dw,
                          PyObject *stream) {
  PyObject *spec = GET(launch, WgradGemm, spec), *lists = GET(launch, WgradGemm, _pairs_at);
  PyObject *grid = GET(launch, WgradGemm, grid),
           *index = GET(GET(spec, WgradSpec, device), Device, index);
  int direct = truth(s, GET(launch, WgradGemm, direct));
  uint64_t x_at = starts_at(s, x), dy_at = starts_at(s, dy), dw_at = starts_at(s, dw);
  refuse_unless(s, lists && PyTuple_CheckExact(lists) && PyTuple_GET_SIZE(lists) == 3 && grid &&
                       PyTuple_CheckExact(grid) && !((x_at | dy_at | dw_at) & 15));
  PyObject *out = dw, *shares = GET(launch, WgradGemm, shares),
           *kinds = GET(spec, WgradSpec, row_kinds);
  if (s->state != GOES_ON || !may_launch(s, index)) return 0;
  PyObject *written = direct ? GET(dw, Tensor, dtype) : g_float32;
  PyObject *key = GET(spec, WgradSpec, key);
  if (s->state != GOES_ON) return 0;
  Pass product =
      pass_of(s, g_wgrad_kernel, index, hold(s, PyTuple_Pack(4, key, Py_True, written, kinds)));
  Pass sum = {0};
  if (!direct) {
    PyObject *sum_key = GET(spec, WgradSpec, sum_key), *dtype = GET(dw, Tensor, dtype);
    if (s->state != GOES_ON) return 0;
    sum = pass_of(s, g_sum_shares_kernel, index, hold(s, PyTuple_Pack(3, sum_key, dtype, Py_True)));
    refuse_unless(s, equal(s, GET(spec, WgradSpec, padding), zero));
    long long rows = number(s, shares) + number(s, GET(spec, WgradSpec, n_offsets));
    long long columns = 4 * number(s, GET(spec, WgradSpec, quads));
    if (s->state != GOES_ON) return 0;
    PyObject *height = hold(s, PyLong_FromLongLong(rows));
    PyObject *width = hold(s, PyLong_FromLongLong(columns));
    out = new_fp32(s, x, height, width);
  }
  uint64_t out_at = starts_at(s, out);
  add_cell(s, &product, x_at), add_cell(s, &product, dy_at), add_cell(s, &product, out_at);
  add_values(s, &product, lists), add_values(s, &product, GET(spec, WgradSpec, leading));
  add_values(s, &product, GET(spec, WgradSpec, rows)),
      add_values(s, &product, GET(spec, WgradSpec, trailing));
  refuse_unless(s, complete(s, &product));
  for (int i = 0; i < 3 && s->state == GOES_ON; i++)
    product.grid[i] = (unsigned)number(s, PyTuple_GET_ITEM(grid, i));
  if (!direct && s->state == GOES_ON) {
    PyObject *blocks = GET(spec, WgradSpec, sum_grid);
    add_cell(s, &sum, out_at), add_cell(s, &sum, dw_at);
    add_value(s, &sum, PyTuple_GET_ITEM(lists, 2));
    add_values(s, &sum, GET(spec, WgradSpec, sum_sizes)), add_value(s, &sum, shares);
    add_values(s, &sum, GET(spec, WgradSpec, layout));
    refuse_unless(s, complete(s, &sum));
    for (int i = 0; i < 3 && s->state == GOES_ON; i++)
      sum.grid[i] = (unsigned)number(s, PyTuple_GET_ITEM(blocks, i));
  }
  run_pass(s, &product, stream);
  if (!direct) run_pass(s, &sum, stream);
  return s->state == GOES_ON;
}

/* `WgradProduct.__call__`. Nothing is refused: what is not known here Python launches. */
static void wgraded(Scope *s, PyObject *product, PyObject *rulebook, int side, PyObject *x,
                    PyObject *dy, PyObject *dw) {
  PyObject *held = SLOT(GET(rulebook, Rulebook, cache), Derived, _entries),
           *sided = side ? one : zero;
  PyObject *first = held ? SLOT(product, WgradProduct, _key) : NULL, *launch = NULL;
  PyObject *key = first ? hold(s, PyNumber_Add(first, sided)) : NULL;
  if (key) launch = item(s, held, key);
  if (key && !launch && s->state == GOES_ON) {
    launch = hold(s, PyObject_CallMethodObjArgs(product, s_WgradProduct__bind, rulebook, sided, x,
                                                dy, dw, NULL));
  }
  PyObject *stream = launch ? stream_of(s, rulebook) : NULL;
  if (stream && s->state == GOES_ON && launched_wgrad(s, launch, x, dy, dw, stream)) return;
  if (s->state == REFUSES) s->state = GOES_ON;
  if (s->state == GOES_ON)
    hold(s, PyObject_CallFunctionObjArgs(product, rulebook, sided, x, dy, dw, NULL));
}

/* `plan.backward` over a map with gradients in the other direction alone(plan, KernelMap, x,
 * weight, dy, whether dx is wanted, dtype of dw or None): (dx, dw). */
static PyObject *gradients(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  SCOPE(s);
  if (count != 7 || declined()) Py_RETURN_NOTIMPLEMENTED;
  PyObject *plan = args[0], *kmap = args[1], *x = args[2], *weight = args[3], *dy = args[4];
  PyObject *dtype = args[6], *dx = Py_None, *dw = Py_None, *wgrad = NULL;
  refuse_unless(s, Py_IS_TYPE(plan, (PyTypeObject *)g_ConvPlan) &&
                       Py_IS_TYPE(kmap, (PyTypeObject *)g_KernelMap) && is_plain(weight));
  refuse_unless(
      s, equal(s, SLOT(plan, ConvPlan, generation), item(s, g_settings, s_settings_generation)));
  Known *back = known_product(s, SLOT(plan, ConvPlan, forward));
  PyObject *rulebook = GET(kmap, KernelMap, rulebook), *ends = GET(rulebook, Rulebook, rows);
  int side = truth(s, GET(kmap, KernelMap, flipped));
  refuse_unless(s, ends && GET(rulebook, Rulebook, backward) == Py_None);
  if (s->state != GOES_ON) return ended(s, NULL);
  long long n_rows = rows_of_end(s, ends, side), n_in = rows_of_end(s, ends, 1 - side);
  long long sizes[4] = {0};
  refuse_unless(s, plain_rows(s, x, &sizes[0], &sizes[1]) && sizes[0] == n_in && n_in > 0 &&
                       plain_rows(s, dy, &sizes[2], &sizes[3]) && sizes[2] == n_rows &&
                       n_rows > 0 && GET(x, Tensor, dtype) == GET(dy, Tensor, dtype));
  if (args[5] == Py_True) back = known_product(s, item(s, SLOT(plan, ConvPlan, _dgrad), Py_False));
  if (dtype != Py_None) {
    wgrad = item(s, SLOT(plan, ConvPlan, _wgrad), dtype);
    refuse_unless(s, wgrad && Py_IS_TYPE(wgrad, (PyTypeObject *)g_WgradProduct) &&
                         SLOT(plan, ConvPlan, _dense) == Py_True);
    dw = empty_like(s, weight, dtype);
  }
  if (s->state != GOES_ON) return ended(s, NULL);
  if (args[5] == Py_True) dx = computed(s, back, dy, weight, rulebook, 1 - side, NULL, NULL);
  /* Nothing is refused from here on. */
  if (dx && wgrad) wgraded(s, wgrad, rulebook, side, x, dy, dw);
  return ended(s, dx && s->state == GOES_ON ? hold(s, PyTuple_Pack(2, dx, dw)) : NULL);
}
