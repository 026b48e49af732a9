/* Host code that queues launches, recorded as steps over numbers and objects: a part of `native.c`.
 *
 * A program computes sizes and addresses, guards what it was recorded for, takes memory, and
 * launches kernels; see `kernels/runtime/launch_trace.py`, which records it. Numbers are whole ones
 * of 64 bits; where Python's would be larger, a guard fails. */

/* A step: its kind and how many words follow. Words are places of numbers unless said. */
enum {
  ADD,
  SUB,
  MUL,
  FLOORDIV,
  MOD,
  SHL,
  MAX, /* result, a, b */
  NEG,
  BITS, /* result, a */
  EQ,
  NE,
  LT,
  LE,
  GT,
  GE,  /* a, b, the outcome that the program is for: 0 or 1 */
  INT, /* place of an object, a: the number as an object */
  TUPLE,
  LIST,    /* place of an object, places of objects */
  CALL,    /* place of an object or -1, of the function, of its arguments */
  ITEM,    /* place of an object, of a sequence, the index */
  ADDRESS, /* result, place of a tensor */
  LAUNCH,  /* place of a launcher, its arguments; of objects: -1 - place */
  DROP,    /* places of objects that nobody needs any more */
  COMMIT,  /* no guard follows: what the earlier program held goes */
  RETURN,  /* place of an object */
  STEP_KINDS
};

#define STEP_WORDS(word) ((word) >> 8)
#define STEP_KIND(word) ((word) & 255)

typedef struct {
  PyObject_HEAD int n_numbers, n_objects, n_words, n_carried;
  int *words;
  int *carried; /* (of objects?, place in the earlier program, place here) */
  int64_t *numbers;
  PyObject *objects; /* a tuple; None where a run puts one */
} HostProgram;

/* What a run knows; the next program goes on from there. */
typedef struct {
  PyObject_HEAD int n_numbers, n_objects;
  int64_t *numbers;
  PyObject **objects;
} HostState;

static void forget_objects(HostState *self) {
  for (int i = 0; i < self->n_objects; i++) Py_CLEAR(self->objects[i]);
}

static void host_state_dealloc(HostState *self) {
  if (self->objects) forget_objects(self);
  PyMem_Free(self->objects), PyMem_Free(self->numbers);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject HostStateType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sparse_bridge_native.HostState",
    .tp_basicsize = sizeof(HostState),
    .tp_dealloc = (destructor)host_state_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
};

static HostState *host_state(HostProgram *program) {
  HostState *made = (HostState *)HostStateType.tp_alloc(&HostStateType, 0);
  if (!made) return NULL;
  made->n_numbers = program->n_numbers;
  made->numbers = PyMem_Malloc((program->n_numbers + 1) * sizeof *made->numbers);
  made->objects = PyMem_Calloc(program->n_objects + 1, sizeof *made->objects);
  if (!made->numbers || !made->objects) return Py_DECREF(made), (HostState *)PyErr_NoMemory();
  memcpy(made->numbers, program->numbers, program->n_numbers * sizeof *made->numbers);
  for (; made->n_objects < program->n_objects; made->n_objects++)
    made->objects[made->n_objects] = Py_NewRef(PyTuple_GET_ITEM(program->objects, made->n_objects));
  return made;
}

/* A result; 0 where Python's would not fit, or there is none. */
static int computed_number(int op, int64_t a, int64_t b, int64_t *to) {
  switch (op) {
  case ADD:
    return !__builtin_add_overflow(a, b, to);
  case SUB:
    return !__builtin_sub_overflow(a, b, to);
  case MUL:
    return !__builtin_mul_overflow(a, b, to);
  case NEG:
    return !__builtin_sub_overflow((int64_t)0, a, to);
  case SHL:
    return b >= 0 && b < 62 && !__builtin_mul_overflow(a, (int64_t)1 << b, to);
  case MAX:
    return *to = a > b ? a : b, 1;
  case BITS:
    *to = 0;
    for (uint64_t rest = a < 0 ? -(uint64_t)a : (uint64_t)a; rest; rest >>= 1) ++*to;
    return 1;
  }
  if (!b || (b == -1 && a == INT64_MIN)) return 0;
  int64_t rest = a % b, down = rest && (rest < 0) != (b < 0); /* towards minus infinity */
  *to = op == MOD ? rest + (down ? b : 0) : a / b - down;
  return 1;
}

static int guard_holds(int op, int64_t a, int64_t b) {
  switch (op) {
  case EQ:
    return a == b;
  case NE:
    return a != b;
  case LT:
    return a < b;
  case LE:
    return a <= b;
  case GT:
    return a > b;
  }
  return a >= b;
}

/* A number as a parameter in memory, as `stored` of an object. */
static int stored_number(char type, int64_t number, uint64_t *cell) {
  int bits = type == 'b' ? 8 : type == 'h' ? 16 : type == 'i' ? 32 : 64;
  if (type == 'f' || type == 'd') {
    PyObject *object = PyLong_FromLongLong(number);
    int fits = object && stored(type, object, cell);
    Py_XDECREF(object);
    return fits;
  }
  if (type == 'P' ? number < 0
                  : bits < 64 && (number >= 1ll << bits || number < -(1ll << (bits - 1))))
    return PyErr_Format(PyExc_OverflowError, "%lld is no number of %d bits", (long long)number,
                        bits),
           0;
  *cell = (uint64_t)number;
  return 1;
}

/* An argument of a launch as a new reference. */
static PyObject *launch_argument(HostState *run, int word) {
  return word < 0 ? Py_NewRef(run->objects[-1 - word]) : PyLong_FromLongLong(run->numbers[word]);
}

static int launched_step(HostState *run, const int *words, int count) {
  PyObject *launcher = run->objects[words[0]];
  const int *operands = words + 1, n = count - 1;
  Launcher *own = (Launcher *)launcher;
  if (!Py_IS_TYPE(launcher, &LauncherType) || n != own->count + 4) {
    PyObject *args[MOST_VALUES + 16] = {NULL}, *made = NULL;
    int known = 0;
    while (known < n && (args[known] = launch_argument(run, operands[known]))) known++;
    if (known == n) made = PyObject_Vectorcall(launcher, args, n, NULL);
    while (known--) Py_DECREF(args[known]);
    Py_XDECREF(made);
    return made != NULL;
  }
  uint64_t cells[MOST_VALUES];
  unsigned grid[3];
  for (int i = 0; i < 3; i++) {
    int64_t size = operands[i] < 0 ? -1 : run->numbers[operands[i]];
    if (size < 0 || size > UINT32_MAX)
      return PyErr_Format(PyExc_OverflowError, "a grid of %lld", (long long)size), 0;
    grid[i] = (unsigned)size;
  }
  for (int i = 0; i < own->count; i++) {
    int word = operands[i + 4];
    if (own->kinds[i] == 'x') continue;
    if (!(word < 0 ? stored(own->kinds[i], run->objects[-1 - word], &cells[i])
                   : stored_number(own->kinds[i], run->numbers[word], &cells[i])))
      return 0;
  }
  if (operands[3] < 0) return PyErr_Format(PyExc_TypeError, "a stream is a number"), 0;
  return started(own, grid, (uint64_t)run->numbers[operands[3]], cells);
}

static PyObject *called_step(HostState *run, const int *words, int count) {
  PyObject *args[MOST_VALUES];
  for (int i = 0; i < count - 2; i++) args[i] = run->objects[words[i + 2]];
  return PyObject_Vectorcall(run->objects[words[1]], args, count - 2, NULL);
}

static PyObject *gathered_step(HostState *run, int op, const int *words, int count) {
  PyObject *made = op == TUPLE ? PyTuple_New(count - 1) : PyList_New(count - 1);
  for (int i = 1; made && i < count; i++) {
    PyObject *one = Py_NewRef(run->objects[words[i]]);
    if (op == TUPLE)
      PyTuple_SET_ITEM(made, i - 1, one);
    else
      PyList_SET_ITEM(made, i - 1, one);
  }
  return made;
}

/* A step that makes an object; NULL with an exception. */
static PyObject *made_object(HostState *run, int op, const int *words, int count) {
  switch (op) {
  case INT:
    return PyLong_FromLongLong(run->numbers[words[1]]);
  case CALL:
    return called_step(run, words, count);
  case ITEM:
    return PySequence_GetItem(run->objects[words[1]], words[2]);
  }
  return gathered_step(run, op, words, count);
}

static int address_of(HostState *run, const int *words) {
  PyObject *at = PyObject_CallMethodNoArgs(run->objects[words[1]], s_Tensor_data_ptr);
  if (at) run->numbers[words[0]] = (int64_t)PyLong_AsUnsignedLongLong(at);
  Py_XDECREF(at);
  return at && !PyErr_Occurred();
}

/* The result; NULL without an exception where a guard fails. */
static PyObject *run_program(HostProgram *program, HostState *run, HostState *earlier) {
  const int *words = program->words, *end = words + program->n_words;
  int64_t *numbers = run->numbers;
  while (words < end) {
    int op = STEP_KIND(*words), count = STEP_WORDS(*words);
    const int *w = words + 1;
    words = w + count;
    if (op <= BITS) {
      int64_t b = op < NEG ? numbers[w[2]] : 0;
      if (!computed_number(op, numbers[w[1]], b, &numbers[w[0]])) return NULL;
    } else if (op <= GE) {
      if (guard_holds(op, numbers[w[0]], numbers[w[1]]) != w[2]) return NULL;
    } else if (op <= ITEM) {
      PyObject *made = made_object(run, op, w, count);
      if (!made) return NULL;
      if (w[0] < 0)
        Py_DECREF(made);
      else
        Py_XSETREF(run->objects[w[0]], made);
    } else if (op == ADDRESS) {
      if (!address_of(run, w)) return NULL;
    } else if (op == LAUNCH) {
      if (!launched_step(run, w, count)) return NULL;
    } else if (op == DROP) {
      for (int i = 0; i < count; i++) Py_XSETREF(run->objects[w[i]], Py_NewRef(Py_None));
    } else if (op == COMMIT) {
      if (earlier) forget_objects(earlier);
    } else {
      return Py_NewRef(run->objects[w[0]]);
    }
  }
  return Py_NewRef(Py_None);
}

/* What the earlier program knows; 0 with an exception where it is no such program's. */
static int carried_over(HostProgram *program, HostState *from, HostState *to) {
  for (const int *w = program->carried; w < program->carried + program->n_carried; w += 3) {
    int fits = w[1] < (w[0] ? from->n_objects : from->n_numbers);
    if (!fits || (w[0] && !from->objects[w[1]]))
      return PyErr_Format(PyExc_ValueError, "a state of another program, or one that went on"), 0;
    if (w[0])
      Py_XSETREF(to->objects[w[2]], Py_NewRef(from->objects[w[1]]));
    else
      to->numbers[w[2]] = from->numbers[w[1]];
  }
  return 1;
}

/* program(state of an earlier program or None, objects, numbers): (result, state), or None where a
 * guard fails. Objects and numbers come first of their kind. */
static PyObject *host_program_call(PyObject *object, PyObject *args, PyObject *names) {
  HostProgram *self = (HostProgram *)object;
  PyObject *earlier, *objects, *numbers;
  if ((names && PyDict_GET_SIZE(names)) ||
      !PyArg_ParseTuple(args, "OO!O!", &earlier, &PyTuple_Type, &objects, &PyList_Type, &numbers))
    return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "a program takes no keywords");
  HostState *before = Py_IS_TYPE(earlier, &HostStateType) ? (HostState *)earlier : NULL;
  Py_ssize_t n_objects = PyTuple_GET_SIZE(objects), n_numbers = PyList_GET_SIZE(numbers);
  if (!self->objects || (!before) != (earlier == Py_None) || (!before && self->n_carried) ||
      n_objects > self->n_objects || n_numbers > self->n_numbers)
    return PyErr_Format(PyExc_ValueError, "what does not fit this program");
  HostState *run = host_state(self);
  PyObject *result = NULL;
  if (!run) return NULL;
  if (before && !carried_over(self, before, run)) goto failed;
  for (Py_ssize_t i = 0; i < n_objects; i++)
    Py_XSETREF(run->objects[i], Py_NewRef(PyTuple_GET_ITEM(objects, i)));
  for (Py_ssize_t i = 0; i < n_numbers; i++) {
    PyObject *number = PyList_GET_ITEM(numbers, i);
    /* What becomes a number by `__index__` could change the list. */
    if (!PyLong_Check(number)) PyErr_Format(PyExc_TypeError, "%R is no whole number", number);
    if (!PyErr_Occurred()) run->numbers[i] = PyLong_AsLongLong(number);
    if (PyErr_Occurred()) goto failed;
  }
  result = run_program(self, run, before);
  if (result) {
    PyObject *both = PyTuple_Pack(2, result, (PyObject *)run);
    Py_DECREF(result), Py_DECREF(run);
    return both;
  }
failed:
  Py_DECREF(run);
  if (PyErr_Occurred()) return NULL;
  Py_RETURN_NONE;
}

/* Whether every step has its words, and every word its place. */
static int well_formed(HostProgram *self) {
  int n = self->n_numbers, m = self->n_objects;
#define NUMBER(at) ((at) >= 0 && (at) < n)
#define OBJECT(at) ((at) >= 0 && (at) < m)
  for (int at = 0; at < self->n_words;) {
    int op = STEP_KIND(self->words[at]), count = STEP_WORDS(self->words[at]), fits = 1;
    const int *w = &self->words[at + 1];
    at += 1 + count;
    if (count < 0 || at > self->n_words) return 0;
    if (op <= BITS) {
      fits = count == (op < NEG ? 3 : 2);
      for (int i = 0; fits && i < count; i++) fits = NUMBER(w[i]);
    } else if (op <= GE) {
      fits = count == 3 && NUMBER(w[0]) && NUMBER(w[1]);
    } else if (op == INT || op == ITEM || op == ADDRESS) {
      fits = count == (op == ITEM ? 3 : 2);
      if (fits) fits = op == ADDRESS ? NUMBER(w[0]) && OBJECT(w[1]) : OBJECT(w[0]);
      if (fits && op != ADDRESS) fits = op == INT ? NUMBER(w[1]) : OBJECT(w[1]);
    } else if (op == LAUNCH) {
      fits = count >= 1 && count <= MOST_VALUES + 16 && OBJECT(w[0]);
      for (int i = 1; fits && i < count; i++) fits = w[i] < 0 ? OBJECT(-1 - w[i]) : NUMBER(w[i]);
    } else if (op == CALL) {
      fits = count >= 2 && count <= MOST_VALUES && w[0] >= -1 && w[0] < m;
      for (int i = 1; fits && i < count; i++) fits = OBJECT(w[i]);
    } else {
      fits = op == COMMIT ? !count : op == DROP || count >= 1;
      fits &= op < STEP_KINDS && (op != RETURN || count == 1);
      for (int i = 0; fits && i < count; i++) fits = OBJECT(w[i]);
    }
    if (!fits) return 0;
  }
  for (const int *w = self->carried; w < self->carried + self->n_carried; w += 3)
    if (w[1] < 0 || !(w[0] ? OBJECT(w[2]) : NUMBER(w[2]))) return 0;
  return 1;
#undef NUMBER
#undef OBJECT
}

static int host_program_clear(HostProgram *self) {
  Py_CLEAR(self->objects);
  return 0;
}

static void host_program_dealloc(HostProgram *self) {
  PyObject_GC_UnTrack(self);
  Py_CLEAR(self->objects);
  PyMem_Free(self->words), PyMem_Free(self->carried), PyMem_Free(self->numbers);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static int host_program_traverse(HostProgram *self, visitproc visit, void *arg) {
  Py_VISIT(self->objects);
  return 0;
}

static void *copied(const char *from, Py_ssize_t size) {
  void *made = PyMem_Malloc(size + 1);
  if (made)
    memcpy(made, from, size);
  else
    PyErr_NoMemory();
  return made;
}

/* HostProgram(int32 steps, int64 numbers, objects, int32 carried), the first two and the last as
 * bytes */
static PyObject *host_program_new(PyTypeObject *type, PyObject *args, PyObject *names) {
  const char *words, *numbers, *carried;
  Py_ssize_t n_words, n_numbers, n_carried;
  PyObject *objects;
  if (!PyArg_ParseTuple(args, "y#y#O!y#", &words, &n_words, &numbers, &n_numbers, &PyTuple_Type,
                        &objects, &carried, &n_carried))
    return NULL;
  HostProgram *self = (HostProgram *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->objects = Py_NewRef(objects), self->n_objects = (int)PyTuple_GET_SIZE(objects);
  self->n_words = (int)(n_words / 4), self->n_numbers = (int)(n_numbers / 8);
  self->n_carried = (int)(n_carried / 4);
  if (!(self->words = copied(words, n_words)) || !(self->numbers = copied(numbers, n_numbers)) ||
      !(self->carried = copied(carried, n_carried)))
    return Py_DECREF(self), NULL;
  if (n_carried % 12 || !well_formed(self))
    return Py_DECREF(self), PyErr_Format(PyExc_ValueError, "these are no steps of a program");
  return (PyObject *)self;
}

static PyTypeObject HostProgramType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sparse_bridge_native.HostProgram",
    .tp_basicsize = sizeof(HostProgram),
    .tp_dealloc = (destructor)host_program_dealloc,
    .tp_traverse = (traverseproc)host_program_traverse,
    .tp_clear = (inquiry)host_program_clear,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_call = host_program_call,
    .tp_new = host_program_new,
    .tp_doc = "Recorded host code: program(state, objects, numbers).",
};
