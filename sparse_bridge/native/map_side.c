/* What launches over one side of a map read: a part of `native.c`. */

static int bits_of(long long number) {
  int bits = 0;
  for (; number; number >>= 1) bits++;
  return bits;
}

static Size size_of(Known *plan, int flow, int reverse, long long n_rows, long long n_in) {
  long long tiles = (n_rows + 63) / 64, most = 4 * plan->units;
  int much = n_in == n_rows ? 0 : (int)nearbyint(log2((double)n_in / (double)n_rows));
  return (Size){flow, reverse, tiles < most ? tiles : most, bits_of(n_rows / plan->units), much};
}

/* The key of a spec for a map's size, as `kernel_products.octaves` and `GatherProduct._bind` make
 * it. */
static PyObject *spec_key(Scope *s, Size *size) {
  return hold(s, Py_BuildValue("(OO(LLL))", size->flow == OVER_TABLE ? unmasked : masked,
                               size->reverse ? Py_True : Py_False, size->tiles, size->bits,
                               size->much));
}

/* `TileList.section_starts`: where in its memory the table, the rows and the lists start, in elements. */
static void places(long long n_offsets, long long n_pairs, int block_m, long long at[4]) {
  long long pitch = 2 * TILE * n_pairs, quads = (n_pairs + 3) / 4 * 4,
            start = pitch + pitch * n_offsets;
  at[0] = pitch, at[1] = 0;
  at[2] = block_m <= TILE ? start : start + 2 * quads * n_offsets;
  at[3] = start + 3 * quads * n_offsets + (block_m <= TILE ? 0 : 2 * quads);
}

/* The rows of one end of a map, Rows(host, device, capacity, padding_value, estimate), where the
 * host knows them all. */
static long long rows_of_end(Scope *s, PyObject *ends, int side) {
  PyObject *rows = PyTuple_GET_ITEM(ends, side);
  refuse_unless(s, PyTuple_GET_SIZE(rows) == 5 && FIELD(rows, Rows, device) == Py_None &&
                       FIELD(rows, Rows, padding_value) == Py_None &&
                       !truth(s, FIELD(rows, Rows, estimate)));
  return number(s, FIELD(rows, Rows, capacity));
}

/* A view of a side: its tiles, or its table. */
typedef struct {
  PyObject *object;
  long long n_pairs, n_offsets, pitch;
  uint64_t memory;
} MapView;

/* One side of a map: what launches over it read. */
typedef struct {
  PyObject *rulebook, *observer;
  int side, at, reverse; /* at: the side whose views it has */
  long long n_rows, n_in;
  MapView view; /* that a plan follows */
} MapSide;

/* What a rulebook has in a list by side; None where there is nothing. */
static PyObject *listed(Scope *s, MapSide *m, PyObject *name) {
  PyObject *views = get(s, m->rulebook, name);
  refuse_unless(s, views && PyList_CheckExact(views) && PyList_GET_SIZE(views) == 2);
  return s->state == GOES_ON ? hold(s, Py_NewRef(PyList_GET_ITEM(views, m->at))) : NULL;
}

static uint64_t address_in(Scope *s, PyObject *at) {
  return s->state == GOES_ON && at ? PyLong_AsUnsignedLongLong(at) : 0;
}

/* `Rulebook.neighbors`: a table that has no room for more rows. */
static void read_table(Scope *s, MapSide *m) {
  MapView *view = &m->view;
  PyObject *table = listed(s, m, s_Rulebook__tables);
  refuse_unless(s, table && table != Py_None);
  PyObject *own = GET(table, NeighborTable, own);
  refuse_unless(s, own && PyTuple_CheckExact(own) && PyTuple_GET_SIZE(own) == 3);
  if (s->state != GOES_ON) return;
  refuse_unless(s, PyTuple_GET_ITEM(own, 2) == Py_None); /* the count of rows in use */
  PyObject *nbr = PyTuple_GET_ITEM(own, 0);
  view->n_offsets = number(s, GET(table, NeighborTable, n_offsets));
  refuse_unless(s, number(s, GET(table, NeighborTable, n_rows)) == m->n_rows);
  if (Py_IS_TYPE(nbr, (PyTypeObject *)g_Part)) {
    view->pitch = m->n_rows, view->memory = address_in(s, GET(nbr, Part, at));
  } else {
    PyObject *step =
        s->state == GOES_ON ? hold(s, PyObject_CallMethodOneArg(nbr, s_Tensor_stride, zero)) : NULL;
    view->pitch = number(s, step), view->memory = address_in(s, CALL(nbr, Tensor, data_ptr));
  }
  refuse_unless(s, !(view->memory & 15));
  view->object = nbr;
}

static void read_tiles(Scope *s, MapSide *m) {
  MapView *view = &m->view;
  PyObject *tiles = listed(s, m, s_Rulebook__tiles);
  refuse_unless(s, tiles && tiles != Py_None);
  view->n_pairs = number(s, GET(tiles, TileList, n_pairs)), view->pitch = 2 * TILE * view->n_pairs;
  view->n_offsets = number(s, GET(tiles, TileList, n_offsets));
  refuse_unless(s, number(s, GET(tiles, TileList, splits)) == 1);
  view->memory = address_in(s, CALL(GET(tiles, TileList, memory), Tensor, data_ptr));
  view->object = tiles;
}

/* Its rows, and who hears of its views. */
static void read_side(Scope *s, MapSide *m) {
  PyObject *ends = GET(m->rulebook, Rulebook, rows);
  refuse_unless(s, ends && PyTuple_CheckExact(ends) && PyTuple_GET_SIZE(ends) == 2);
  if (s->state != GOES_ON) return;
  m->n_rows = rows_of_end(s, ends, m->side), m->n_in = rows_of_end(s, ends, 1 - m->side);
  int symmetric = truth(s, GET(m->rulebook, Rulebook, symmetric));
  m->at = symmetric ? 0 : m->side, m->reverse = symmetric && m->side;
  m->observer = GET(m->rulebook, Rulebook, _observer);
  refuse_unless(s, m->n_rows > 0 && m->n_in > 0);
}

/* `Views.on_view` of a view, or that of another observer. */
static void noticed(Scope *s, MapSide *m, int tiled) {
  PyObject *side = m->at ? one : zero, *observer = m->observer;
  if (s->state != GOES_ON || observer == Py_None) return;
  if ((PyObject *)Py_TYPE(observer) != PyDict_GetItemWithError(g_calls, s_calls_observer)) {
    PyObject *tiles = tiled ? Py_True : Py_False;
    hold(s, PyObject_CallMethodObjArgs(observer, s_Observer_on_view, side, tiles, NULL));
    return;
  }
  for (int i = !tiled; i < 2; i++) /* tiled, requested */
    if (PySet_Add(PyTuple_GET_ITEM(observer, i), side) < 0) s->state = RAISES;
}

/* How a plan goes over a side, as `choice.flow_of`. What groups have tuned is Python's. */
static int flow_over(Scope *s, Known *plan, MapSide *m) {
  int forced = plan->below[0] < 0, few = m->n_rows <= plan->few_rows;
  if (plan->flow == BY_PYTHON || forced || s->state != GOES_ON) return plan->flow;
  refuse_unless(s, PyDict_CheckExact(plan->tuned) && !PyDict_GET_SIZE(plan->tuned));
  if (plan->flow == OVER_TILES) {
    PyObject *tiles = listed(s, m, s_Rulebook__tiles);
    if (tiles && tiles != Py_None) return OVER_TILES;
    refuse_unless(s, !truth(s, GET(m->rulebook, Rulebook, symmetric)));
  }
  refuse_unless(s, !truth(s, GET(m->rulebook, Rulebook, trained)));
  return m->n_rows < plan->below[few ? 0 : 1] ? OVER_TABLE : BY_PYTHON;
}

/* The view that a plan follows; refuses where Python has to make one. */
static int view_for(Scope *s, Known *plan, MapSide *m) {
  int flow = flow_over(s, plan, m);
  refuse_unless(s, flow != BY_PYTHON);
  if (s->state != GOES_ON) return flow;
  if (flow == OVER_TILES)
    read_tiles(s, m);
  else
    read_table(s, m);
  return flow;
}

/* The launch of a plan that maps of such a size have had before. */
static Bound *spec_for(Scope *s, Known *plan, MapSide *m, int flow) {
  Size size = size_of(plan, flow, m->reverse, m->n_rows, m->n_in);
  for (int i = 0; i < SIZES && s->state == GOES_ON; i++)
    if (plan->likes[i] && !memcmp(&plan->sizes[i], &size, sizeof size))
      return (Bound *)plan->likes[i];
  PyObject *spec = item(s, plan->specs, spec_key(s, &size)), *like = NULL;
  refuse_unless(s, spec != NULL);
  like = GET(spec, GemmSpec, native);
  refuse_unless(s, like && Py_IS_TYPE(like, &BoundType));
  if (s->state != GOES_ON) return NULL;
  int at = plan->next++ % SIZES;
  plan->sizes[at] = size;
  Py_XSETREF(plan->likes[at], Py_NewRef(like));
  return (Bound *)like;
}

/* The numbers of a launch over a view of a side, and its grid; refuses what addresses do not
 * reach. They do reach rows of less than 2 GiB, as the input is here. */
static void placed(Scope *s, Bound *like, MapSide *m, int flow, uint64_t *cells,
                   unsigned *programs) {
  MapView *view = &m->view;
  long long far = 1ll << 31, starts[4] = {0};
  long long count = (m->n_rows + like->spec.block_m - 1) / like->spec.block_m *
                    ((like->spec.c_out + like->spec.block_n - 1) / like->spec.block_n);
  refuse_unless(s, m->n_rows * like->spec.columns < far && view->n_offsets * view->pitch < far &&
                       view->n_offsets * like->spec.w_stride < far);
  if (flow == OVER_TILES) places(view->n_offsets, view->n_pairs, (int)like->spec.block_m, starts);
  for (int i = 0; i < 4; i++) cells[i] = view->memory + 4 * (uint64_t)starts[i];
  cells[4] = (uint64_t)m->n_rows, cells[5] = (uint64_t)view->pitch;
  cells[6] = (uint64_t)view->n_offsets;
  *programs = (unsigned)count;
}
