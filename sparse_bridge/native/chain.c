/* Convolutions in a row: a part of `native.c`, whose guards and launches it uses.
 *
 * Convolutions of a program, of which each reads values that are there and results of earlier ones.
 * What only they read is no tensor: it lies in one piece of memory, where the next may follow it. */

#define MOST_STEPS 256
#define MOST_SIDES 64

typedef struct {
  PyObject *plan; /* FusedPlan */
  /* Places in the list of values. -1: absent; no map is that of every row onto itself. operands as
   * of `Operands`, without y. */
  int operands[OPERANDS - 1], kmap, transposed;
  int last; /* the step that reads the result last; negative: others do, too */
  long long columns;
} ChainStep;

typedef struct {
  PyObject_HEAD int first, n_steps; /* first: the place of the first result */
  int refused; /* the step whose map or launch the last call refused; negative: none */
  long long itemsize;
  ChainStep *steps;
} Chain;

/* What a run knows of a step. */
typedef struct {
  MapSide *side;
  int flow;
  Bound *like;
  uint64_t operands[OPERANDS - 1], cells[7];
  uint64_t size, at; /* of its result; at: in the memory */
  unsigned programs;
  PyObject *tensor; /* the result, where it is one */
} Prepared;

typedef struct {
  Scope *s;
  Chain *chain;
  PyObject *values;
  MapSide sides[MOST_SIDES];
  PyObject *streams[MOST_SIDES];
  int n_sides;
  Prepared *steps;
} Run;

/* What is at an index of the list; NULL in a scope that refuses where nothing is. */
static PyObject *value(Run *run, Scope *s, int index) {
  refuse_unless(s, index < PyList_GET_SIZE(run->values));
  return s->state == GOES_ON ? PyList_GET_ITEM(run->values, index) : NULL;
}

/* The step whose result is at an index; negative: none of the chain. */
static int step_at(Run *run, int index) { return index - run->chain->first; }

static MapSide *side_for(Run *run, PyObject *kmap, int transposed) {
  Scope *s = run->s;
  for (int i = 0; i < run->n_sides; i++)
    if (run->sides[i].kmap == kmap && run->sides[i].transposed == transposed) return &run->sides[i];
  refuse_unless(s, run->n_sides < MOST_SIDES && Py_IS_TYPE(kmap, (PyTypeObject *)g_KernelMap) &&
                       GET(kmap, KernelMap, x_fold) == Py_None &&
                       GET(kmap, KernelMap, y_fold) == Py_None);
  if (s->state != GOES_ON) return NULL;
  MapSide *m = &run->sides[run->n_sides];
  *m =
      (MapSide){.kmap = kmap, .transposed = transposed, .rulebook = GET(kmap, KernelMap, rulebook)};
  m->side = truth(s, GET(kmap, KernelMap, flipped)) ^ transposed;
  read_side(s, m);
  run->streams[run->n_sides] = stream_of(s, m->rulebook);
  return s->state == GOES_ON ? &run->sides[run->n_sides++] : NULL;
}

/* So many rows, each onto itself, on the GPU of a plan. */
static MapSide *side_of_rows(Run *run, Known *plan, long long n_rows) {
  Scope *s = run->s;
  for (int i = 0; i < run->n_sides; i++)
    if (!run->sides[i].kmap && run->sides[i].n_rows == n_rows) return &run->sides[i];
  refuse_unless(s, run->n_sides < MOST_SIDES && n_rows > 0 && plan->below[0] < 0 &&
                       equal(s, plan->n_offsets, one));
  PyObject *count = hold(s, PyLong_FromLongLong(n_rows)), *made = NULL;
  PyObject *row_numbers = item(s, g_calls, s_calls_row_numbers);
  refuse_unless(s, row_numbers && row_numbers != Py_None);
  if (s->state == GOES_ON)
    made = hold(s, PyObject_CallFunctionObjArgs(row_numbers, plan->device, count, NULL));
  refuse_unless(s, made && PyTuple_CheckExact(made) && PyTuple_GET_SIZE(made) == 2);
  if (s->state != GOES_ON) return NULL;
  MapSide *m = &run->sides[run->n_sides];
  *m = (MapSide){.n_rows = n_rows, .n_in = n_rows};
  PyObject *at = CALL(PyTuple_GET_ITEM(made, 0), Tensor, data_ptr);
  MapView *view = &m->views[OVER_TABLE];
  *view = (MapView){PyTuple_GET_ITEM(made, 0), 0, 1, n_rows, address_in(s, at)};
  refuse_unless(s, !(view->memory & 15));
  run->streams[run->n_sides] = PyTuple_GET_ITEM(made, 1);
  return s->state == GOES_ON ? &run->sides[run->n_sides++] : NULL;
}

/* Rows of an operand that has columns, which lie one after another. */
static long long rows_of_operand(Run *run, Scope *s, int index, PyObject *dtype,
                                 long long columns) {
  int at = step_at(run, index);
  if (at >= 0) {
    refuse_unless(s, run->chain->steps[at].columns == columns);
    return run->steps[at].side->n_rows;
  }
  PyObject *tensor = value(run, s, index);
  refuse_unless(s, tensor && is_plain(tensor));
  PyObject *shape = GET(tensor, Tensor, shape);
  refuse_unless(s, shape && PyTuple_GET_SIZE(shape) == 2 && GET(tensor, Tensor, dtype) == dtype &&
                       truth(s, CALL(tensor, Tensor, is_contiguous)));
  if (s->state != GOES_ON) return -1;
  refuse_unless(s, number(s, PyTuple_GET_ITEM(shape, 1)) == columns);
  return s->state == GOES_ON ? number(s, PyTuple_GET_ITEM(shape, 0)) : -1;
}

/* The map of a step, or as many rows as its input has. */
static MapSide *side_of_step(Run *run, Scope *s, ChainStep *step, Known *plan) {
  if (step->kmap >= 0) {
    PyObject *kmap = value(run, s, step->kmap);
    return s->state == GOES_ON ? side_for(run, kmap, step->transposed) : NULL;
  }
  int at = step_at(run, step->operands[0]);
  if (at >= 0) return side_of_rows(run, plan, run->steps[at].side->n_rows);
  PyObject *x = value(run, s, step->operands[0]);
  refuse_unless(s, x && is_plain(x));
  PyObject *shape = GET(x, Tensor, shape);
  refuse_unless(s, shape && PyTuple_GET_SIZE(shape) == 2);
  long long n_rows = s->state == GOES_ON ? number(s, PyTuple_GET_ITEM(shape, 0)) : 0;
  return s->state == GOES_ON ? side_of_rows(run, plan, n_rows) : NULL;
}

/* The weight of a step as its kernel reads it. A copy lives as long as the run. */
static PyObject *weight_of_step(Run *run, Scope *s, int index, Known *plan) {
  PyObject *weight = value(run, s, index);
  PyObject *copied = s->state == GOES_ON ? SLOT(plan->product, GatherProduct, _copied) : Py_None;
  if (copied == Py_None) return weight;
  weight = hold(run->s, PyObject_CallMethodOneArg(copied, s_WeightLayout_rows_of, weight));
  if (run->s->state != GOES_ON) s->state = run->s->state;
  return weight;
}

/* `view_for` of a side, whose view lives as long as the run. */
static int view_in(Run *run, Scope *s, Known *plan, MapSide *m) {
  int tiles = m->views[OVER_TILES].object != NULL, table = m->views[OVER_TABLE].object != NULL;
  int flow = view_for(run->s, plan, m);
  if (!(flow == OVER_TILES ? tiles : table)) noticed(run->s, m, flow == OVER_TILES);
  if (run->s->state != GOES_ON) s->state = run->s->state;
  return flow;
}

/* Everything that can be refused, before anything is launched. */
static void prepare(Run *run, Scope *s, int i) {
  Chain *chain = run->chain;
  ChainStep *step = &chain->steps[i];
  Prepared *to = &run->steps[i];
  Known *plan = (Known *)SLOT(step->plan, FusedPlan, native);
  refuse_unless(s, plan && Py_IS_TYPE(plan, &KnownType) && plan->product &&
                       number(s, PyDict_GetItemWithError(g_settings, s_settings_generation)) ==
                           plan->generation);
  int *at = step->operands, residual = at[7];
  if (s->state == GOES_ON) to->side = side_of_step(run, s, step, plan);
  if (s->state == GOES_ON) s->state = run->s->state;
  if (s->state == GOES_ON) {
    to->flow = view_in(run, s, plan, to->side);
    if (s->state == REFUSES) chain->refused = i;
  }
  if (s->state == GOES_ON) {
    to->like = spec_for(s, plan, to->side, to->flow);
    if (s->state == REFUSES && missed_again(plan, to->side, to->flow)) chain->refused = i;
  }
  if (s->state != GOES_ON) return;
  PyObject *dtype = to->like->kinds[1];
  if (i) refuse_unless(s, equal(s, to->like->index, run->steps[0].like->index)); /* one GPU */
  refuse_unless(s, dtype && GET(value(run, s, at[1]), Tensor, dtype) == dtype);
  for (int k = 3; k < 7; k++) /* vectors of the norm are those of the plan */
    refuse_unless(s, (at[k] < 0 ? Py_None : value(run, s, at[k])) ==
                         PyTuple_GET_ITEM(plan->read, k - 2));
  for (int k = 1; k < 8; k++) refuse_unless(s, (at[k] < 0) == !to->like->kinds[k]);
  if (to->side->rulebook)
    refuse_unless(s, equal(s, GET(to->side->rulebook, Rulebook, n_offsets), plan->n_offsets));
  refuse_unless(s,
                rows_of_operand(run, s, at[0], dtype, to->like->spec.columns_in) == to->side->n_in);
  if (residual >= 0)
    refuse_unless(s, rows_of_operand(run, s, residual, dtype, step->columns) == to->side->n_rows);
  if (s->state != GOES_ON) return;
  placed(s, to->like, to->side, to->flow, to->cells, &to->programs);
  to->size = (uint64_t)(to->side->n_rows * step->columns * chain->itemsize);
  refuse_unless(s, to->size < 1ull << 31 &&
                       to->side->n_in * to->like->spec.columns_in * chain->itemsize < 1ll << 31);
  for (int k = 0; k < OPERANDS - 1 && s->state == GOES_ON; k++)
    if (at[k] >= 0 && step_at(run, at[k]) < 0) {
      PyObject *from = k == 1 ? weight_of_step(run, s, at[k], plan) : value(run, s, at[k]);
      PyObject *start = CALL(from, Tensor, data_ptr);
      if (start) to->operands[k] = PyLong_AsUnsignedLongLong(start);
    }
  for (int k = 0; k < OPERANDS - 1; k++) refuse_unless(s, !(to->operands[k] & 15));
}

/* Where results lie, that are no tensors: the first gap that holds each. Bytes in all. */
static uint64_t laid_out(Run *run) {
  int live[MOST_STEPS], count = 0;
  uint64_t most = 0;
  for (int i = 0; i < run->chain->n_steps; i++) {
    int kept = 0;
    for (int k = 0; k < count; k++) /* in order of address */
      if (run->chain->steps[live[k]].last >= i) live[kept++] = live[k];
    count = kept;
    if (run->chain->steps[i].last < 0) continue;
    uint64_t at = 0, size = (run->steps[i].size + 511) & ~511ull;
    int k = 0;
    for (; k < count && run->steps[live[k]].at < at + size; k++)
      at = run->steps[live[k]].at + ((run->steps[live[k]].size + 511) & ~511ull);
    memmove(&live[k + 1], &live[k], (count++ - k) * sizeof *live);
    live[k] = i, run->steps[i].at = at;
    if (at + size > most) most = at + size;
  }
  return most;
}

/* Where the result of a step is. */
static uint64_t address(Run *run, int i, uint64_t memory) {
  return run->steps[i].tensor ? run->steps[i].at : memory + run->steps[i].at;
}

/* Tensors for results and memory for what lies between; its address. */
static uint64_t taken_memory(Run *run, PyObject *like) {
  Scope *s = run->s;
  uint64_t bytes = laid_out(run);
  for (int i = 0; i < run->chain->n_steps && s->state == GOES_ON; i++) {
    if (run->chain->steps[i].last >= 0) continue;
    PyObject *rows = hold(s, PyLong_FromLongLong(run->steps[i].side->n_rows));
    PyObject *columns = hold(s, PyLong_FromLongLong(run->chain->steps[i].columns));
    PyObject *made =
        hold(s, PyObject_CallMethodObjArgs(like, s_Tensor_new_empty, rows, columns, NULL));
    PyObject *at = CALL(made, Tensor, data_ptr);
    run->steps[i].tensor = made;
    if (at) run->steps[i].at = PyLong_AsUnsignedLongLong(at);
    refuse_unless(s, !(run->steps[i].at & 15));
  }
  if (!bytes) return 0;
  PyObject *count = hold(s, PyLong_FromUnsignedLongLong(bytes / run->chain->itemsize));
  PyObject *memory = s->state == GOES_ON
                         ? hold(s, PyObject_CallMethodOneArg(like, s_Tensor_new_empty, count))
                         : NULL;
  PyObject *at = CALL(memory, Tensor, data_ptr);
  bytes = at ? PyLong_AsUnsignedLongLong(at) : 0;
  refuse_unless(s, !(bytes & 15));
  return bytes;
}

static void launch_all(Run *run, uint64_t memory) {
  Scope *s = run->s;
  for (int i = 0; i < run->chain->n_steps && s->state == GOES_ON; i++) {
    ChainStep *step = &run->chain->steps[i];
    Prepared *of = &run->steps[i];
    uint64_t cells[MOST_VALUES], y = address(run, i, memory);
    memcpy(cells, of->like->cells, sizeof cells);
    memcpy(&cells[OPERANDS], of->cells, sizeof of->cells);
    for (int k = 0; k < OPERANDS - 1; k++) {
      int index = step->operands[k], made = step_at(run, index);
      cells[k] = index < 0 ? y : made < 0 ? of->operands[k] : address(run, made, memory);
    }
    cells[OPERANDS - 1] = y;
    unsigned grid[3] = {of->programs, of->like->grid[1], of->like->grid[2]};
    uint64_t on = PyLong_AsUnsignedLongLong(run->streams[of->side - run->sides]);
    if (PyErr_Occurred() || !started(of->like->launcher, grid, on, cells)) s->state = RAISES;
  }
}

/* Nobody watches, or computes something else by it. */
static void undisturbed(Scope *s) {
  refuse_unless(s, unset(s, s_torch_c__is_any_autocast_enabled) &&
                       unset(s, s_torch_c__len_torch_function_stack) &&
                       unset(s, s_torch_c__len_torch_dispatch_stack));
  refuse_unless(s,
                number(s, PyDict_GetItemWithError(g_forward_ad, s_forward_ad__current_level)) < 0);
  refuse_unless(s, idle(s, g_override, s_override_inside) && idle(s, g_trace, s_trace_recorders));
}

/* `ChainStep.__call__`, chain(values): None; the results that others read are in their places of the list */
static PyObject *chain_call(PyObject *object, PyObject *args, PyObject *names) {
  Chain *chain = (Chain *)object;
  SCOPE(s);
  Prepared steps[MOST_STEPS];
  PyObject *values = PyTuple_GET_SIZE(args) == 1 && !names ? PyTuple_GET_ITEM(args, 0) : NULL;
  if (!values || !PyList_CheckExact(values) ||
      PyList_GET_SIZE(values) < chain->first + chain->n_steps)
    return PyErr_Format(PyExc_TypeError, "a chain takes the list of its values");
  if (declined()) Py_RETURN_NOTIMPLEMENTED;
  memset(steps, 0, chain->n_steps * sizeof *steps);
  Run run = {.s = s, .chain = chain, .values = values, .steps = steps};
  PyObject *first = value(&run, s, chain->steps[0].operands[0]);
  chain->refused = -1;
  undisturbed(s);
  for (int i = 0; i < chain->n_steps && s->state == GOES_ON; i++) {
    SCOPE(own);
    prepare(&run, own, i);
    s->state = own->state;
    Py_XDECREF(ended(own, Py_None));
  }
  if (s->state != GOES_ON || !may_launch(s, steps[0].like->index)) return ended(s, NULL);
  uint64_t memory = taken_memory(&run, first);
  if (s->state != GOES_ON) return ended(s, NULL);
  launch_all(&run, memory);
  for (int i = 0; i < chain->n_steps && s->state == GOES_ON; i++)
    if (steps[i].tensor && PyList_SetItem(values, chain->first + i, Py_NewRef(steps[i].tensor)) < 0)
      s->state = RAISES;
  return ended(s, Py_None);
}

static void chain_dealloc(Chain *self) {
  PyObject_GC_UnTrack(self);
  for (int i = 0; i < self->n_steps; i++) Py_CLEAR(self->steps[i].plan);
  PyMem_Free(self->steps);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static int chain_traverse(Chain *self, visitproc visit, void *arg) {
  for (int i = 0; i < self->n_steps; i++) Py_VISIT(self->steps[i].plan);
  return 0;
}

static int chain_clear(Chain *self) {
  for (int i = 0; i < self->n_steps; i++) Py_CLEAR(self->steps[i].plan);
  return 0;
}

/* Chain(steps, place of the first step's result, bytes of a value), a step: (FusedPlan, columns of
 * the result, whether the map is read backwards, the last step that reads it or a negative number,
 * the map's place, the places of x, weight, bias, mean, variance, gain, shift, residual; -1 for
 * none) */
static PyObject *chain_new(PyTypeObject *type, PyObject *args, PyObject *names) {
  PyObject *steps;
  int first;
  long long itemsize;
  if (!PyArg_ParseTuple(args, "O!iL", &PyTuple_Type, &steps, &first, &itemsize)) return NULL;
  Py_ssize_t count = PyTuple_GET_SIZE(steps);
  if (!count || count > MOST_STEPS || itemsize < 1)
    return PyErr_Format(PyExc_ValueError, "a chain of %zd steps; 1 to %d fit", count, MOST_STEPS);
  Chain *self = (Chain *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->first = first, self->itemsize = itemsize, self->refused = -1;
  if (!(self->steps = PyMem_Calloc(count, sizeof *self->steps)))
    return Py_DECREF(self), PyErr_NoMemory();
  for (; self->n_steps < count; self->n_steps++) {
    ChainStep *to = &self->steps[self->n_steps];
    int *at = to->operands, own = first + self->n_steps;
    PyObject *plan;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(steps, self->n_steps), "OLiiiiiiiiiii", &plan,
                          &to->columns, &to->transposed, &to->last, &to->kmap, &at[0], &at[1],
                          &at[2], &at[3], &at[4], &at[5], &at[6], &at[7]))
      return Py_DECREF(self), NULL;
    int fits = to->kmap >= -1 && to->kmap < first && at[0] >= 0 && at[1] >= 0;
    for (int k = 0; k < OPERANDS - 1; k++)
      fits &= at[k] >= -1 && at[k] < (k == 0 || k == 7 ? own : first);
    if (!fits || !Py_IS_TYPE(plan, (PyTypeObject *)g_FusedPlan) ||
        (!self->n_steps && at[0] >= first))
      return Py_DECREF(self), PyErr_Format(PyExc_ValueError, "a step that does not fit its chain");
    to->plan = Py_NewRef(plan);
  }
  return (PyObject *)self;
}

static PyMemberDef chain_members[] = {{"refused", T_INT, offsetof(Chain, refused), READONLY, NULL},
                                      {0}};

static PyTypeObject ChainType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sparse_bridge_native.Chain",
    .tp_basicsize = sizeof(Chain),
    .tp_dealloc = (destructor)chain_dealloc,
    .tp_traverse = (traverseproc)chain_traverse,
    .tp_clear = (inquiry)chain_clear,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_call = chain_call,
    .tp_members = chain_members,
    .tp_new = chain_new,
    .tp_doc = "Convolutions in a row: chain(values).",
};
