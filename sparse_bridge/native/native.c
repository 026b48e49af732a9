/* What is the same at every call of a known layer: guards, result, parameters, launch.
 *
 * Python describes what a layer does. This file repeats the part of a call in which nothing is left
 * to decide, over the same Python objects; every function names the one that it repeats.
 * Where something is not as the plan of the layer says, it returns NotImplemented before it has
 * changed anything, and Python takes the whole call. A refused call costs time and nothing else.
 *
 * No header of torch or CUDA is needed: tensors are asked through their own methods, and the launch
 * function of the driver comes as an address.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#define MOST_VALUES 64 /* of a kernel */
#define OPERANDS 9     /* of a gather-GEMM that are tensors: x, w, six of the epilogue, y */

/* ---- names, and what Python hands over ------------------------------------------------------- */

/* How a function here is written
 *
 *   What it reads of Python is listed in `reads.py`, of which this header is made. OWNER is a class,
 *   a module or an object there:
 *
 *     s_OWNER_name   the string: GET(object, OWNER, name) asks for the attribute, CALL(..) calls a
 *                    method without arguments, item(s, g_OWNER, s_OWNER_name) is a module's global
 *     g_OWNER        the object itself, of a module its dictionary
 *     o_OWNER_name   where a slot is: SLOT(object, OWNER, name), PUT(object, OWNER, name, value)
 *     i_OWNER_name   the index of a named tuple's field: FIELD(tuple, OWNER, name)
 *
 *   A name that is not in the list does not compile; one that Python has no more is refused when the
 *   helper is loaded. The function's comment names its twin in Python, whose docstring names it.
 *
 *     static PyObject *rows_in(PyObject *module, PyObject *const *args, Py_ssize_t count) {
 *       SCOPE(s);                                   // what the call holds, and whether it goes on
 *       if (count != 1 || declined()) Py_RETURN_NOTIMPLEMENTED;
 *       PyObject *rulebook = GET(args[0], KernelMap, rulebook);
 *       PyObject *order = GET(rulebook, Rulebook, order);         // of NULL: NULL, so no checks
 *       refuse_unless(s, order == Py_None);                       // Python takes the call
 *       if (s->state != GOES_ON) return ended(s, NULL);           // before C reads an object itself
 *       PUT(history, History, alone, zero);                       // from here on nothing is refused
 *       return ended(s, hold(s, PyLong_FromLong(1)));
 *     }
 *
 *   `s` is in one of three states. GOES_ON: all is well. REFUSES: `ended` returns NotImplemented.
 *   RAISES: an exception is set, and `ended` returns NULL. Once it does not go on, every function
 *   that takes it does nothing and returns NULL, 0 or -1, so that questions can follow each other;
 *   what is between them and reads memory asks `s->state` first. New references go through `hold`,
 *   and `ended` gives them back. `truth`, `number`, `equal` ask an object and may raise, too. What
 *   changes an object or launches stands behind the last `refuse_unless`. */
#include "reads.h"

static PyObject *zero, *one, *two, *masked, *unmasked, *letters[3]; /* as `epilogue.STEPS` */
static PyObject *no_slope;                                          /* 0.0 */
static int configured;
static uint64_t refusing; /* of 2^32 questions, so many are refused at random: for tests */
static uint64_t drawn;
static PyObject *asked_at; /* `settings.generation` when the switch was last asked */
static int turned_off;

static int refused(void) {
  if (!configured) return 1;
  if (!refusing) return 0;
  drawn ^= drawn << 13, drawn ^= drawn >> 7, drawn ^= drawn << 17;
  return (drawn >> 32) < refusing;
}

/* Whether torch's switch for sums in fp16, which it has from 2.7 on, has been turned since Python
 * asked it. */
static int sums_turned(void) {
  PyObject *ask = PyDict_GetItem(g_torch_c, s_torch_c__get_cublas_allow_fp16_accumulation);
  PyObject *now = ask ? PyObject_CallNoArgs(ask) : NULL;
  if (ask && !now) PyErr_Clear(); /* Python asks again, and raises */
  int turned = ask && now != PyDict_GetItem(g_precision, s_precision_fp16_sums);
  Py_XDECREF(now);
  return turned;
}

/* Whether Python is to take a call: also where the setting `native` is off now. */
static int declined(void) {
  if (refused() || sums_turned()) return 1;
  PyObject *now = PyDict_GetItem(g_settings, s_settings_generation);
  if (now == asked_at) return turned_off;
  Py_XINCREF(now); /* another thread may change it meanwhile: then it is asked again */
  PyObject *get = PyDict_GetItem(g_settings, s_settings_get);
  PyObject *settings = get ? PyObject_CallNoArgs(get) : NULL;
  PyObject *native = settings ? PyObject_GetAttr(settings, s_Settings_native) : NULL;
  Py_XDECREF(settings);
  if (!native || !now) {
    PyErr_Clear(); /* Python asks again, and raises */
    Py_XDECREF(native), Py_XDECREF(now);
    return 1;
  }
  turned_off = native == Py_False;
  Py_DECREF(native);
  Py_XSETREF(asked_at, now);
  return turned_off;
}

/* ---- references that one call holds ---------------------------------------------------------- */

enum { GOES_ON, REFUSES, RAISES };

typedef struct {
  PyObject *held[1024];
  int count, state;
} Scope;

#define SCOPE(s)                    \
  Scope s##_scope, *s = &s##_scope; \
  s->count = 0, s->state = GOES_ON

static PyObject *hold(Scope *s, PyObject *object) {
  if (!object) {
    if (s->state == GOES_ON || PyErr_Occurred()) s->state = RAISES;
    return NULL;
  }
  if (s->count == (int)(sizeof s->held / sizeof *s->held)) {
    Py_DECREF(object);
    PyErr_SetString(PyExc_SystemError, "sparse_bridge: a call holds too many references");
    s->state = RAISES;
    return NULL;
  }
  s->held[s->count++] = object;
  return object;
}

/* An attribute. NULL once something has failed, so that calls can follow each other. */
static PyObject *get(Scope *s, PyObject *object, PyObject *name) {
  if (s->state != GOES_ON || !object) return NULL;
  return hold(s, PyObject_GetAttr(object, name));
}

static PyObject *call(Scope *s, PyObject *object, PyObject *name) {
  if (s->state != GOES_ON || !object) return NULL;
  return hold(s, PyObject_CallMethodNoArgs(object, name));
}

/* What a slot holds, for as long as the call lasts. */
static PyObject *slot(Scope *s, PyObject *object, PyObject *type, Py_ssize_t at) {
  if (s->state != GOES_ON || !object) return NULL;
  PyObject *value =
      Py_IS_TYPE(object, (PyTypeObject *)type) ? *(PyObject **)((char *)object + at) : NULL;
  if (!value) return s->state = REFUSES, NULL;
  return hold(s, Py_NewRef(value));
}

static void put(Scope *s, PyObject *object, Py_ssize_t at, PyObject *value) {
  if (s->state != GOES_ON || !object || !value) return;
  PyObject **place = (PyObject **)((char *)object + at);
  Py_XSETREF(*place, Py_NewRef(value));
}

#define SLOT(object, type, name) slot(s, (object), g_##type, o_##type##_##name)
#define PUT(object, type, name, value) put(s, (object), o_##type##_##name, (value))
#define GET(object, owner, name) get(s, (object), s_##owner##_##name)
#define CALL(object, owner, name) call(s, (object), s_##owner##_##name)
#define FIELD(tuple, owner, name) PyTuple_GET_ITEM((tuple), i_##owner##_##name)

static void refuse_unless(Scope *s, int fits) {
  if (s->state == GOES_ON && (!fits || refused())) s->state = REFUSES;
}

static void set(Scope *s, PyObject *object, PyObject *name, PyObject *value) {
  if (s->state == GOES_ON && PyObject_SetAttr(object, name, value) < 0) s->state = RAISES;
}

static long long number(Scope *s, PyObject *value) {
  if (s->state != GOES_ON || !value) return -1;
  if (!PyLong_Check(value)) return s->state = REFUSES, -1;
  long long made = PyLong_AsLongLong(value);
  if (made == -1 && PyErr_Occurred()) s->state = RAISES;
  return made;
}

static int truth(Scope *s, PyObject *value) {
  if (s->state != GOES_ON || !value) return 0;
  if (value == Py_True) return 1;
  if (value == Py_False || value == Py_None) return 0;
  int made = PyObject_IsTrue(value);
  if (made < 0) s->state = RAISES;
  return made > 0;
}

static int equal(Scope *s, PyObject *a, PyObject *b) {
  if (s->state != GOES_ON || !a || !b) return 0;
  if (a == b) return 1;
  int made = PyObject_RichCompareBool(a, b, Py_EQ);
  if (made < 0) s->state = RAISES;
  return made > 0;
}

/* Whether a global of a module, or what a function of torch says, is false or 0. */
static int idle(Scope *s, PyObject *module, PyObject *name) {
  if (s->state != GOES_ON) return 0;
  PyObject *value = PyDict_GetItemWithError(module, name);
  if (!value) return s->state = REFUSES, 0;
  return !truth(s, value);
}

/* What a dictionary has, for as long as the call lasts: other threads may put something else there.
 */
static PyObject *item(Scope *s, PyObject *dict, PyObject *key) {
  if (s->state != GOES_ON || !dict || !key) return NULL;
  PyObject *found = PyDict_GetItemWithError(dict, key);
  return found || PyErr_Occurred() ? hold(s, Py_XNewRef(found)) : NULL;
}

static PyObject *asked(Scope *s, PyObject *name) {
  PyObject *function = item(s, g_torch_c, name);
  if (!function) return refuse_unless(s, 0), NULL;
  return hold(s, PyObject_CallNoArgs(function));
}

/* Of the GPU of a tensor, the current stream; NULL in a scope that refuses where nobody knows. */
static PyObject *stream_on(Scope *s, PyObject *device) {
  PyObject *function = item(s, g_torch_c, s_torch_c__cuda_getCurrentRawStream),
           *index = GET(device, Device, index);
  refuse_unless(s, function && index);
  return s->state == GOES_ON ? hold(s, PyObject_CallOneArg(function, index)) : NULL;
}

static int unset(Scope *s, PyObject *name) { return !truth(s, asked(s, name)); }

/* Of a call: its result, with all references given back. */
static PyObject *ended(Scope *s, PyObject *result) {
  if (s->state == GOES_ON && !result) s->state = REFUSES;
  if (PyErr_Occurred()) s->state = RAISES; /* keys that cannot be hashed */
  PyObject *made = NULL;
  if (s->state == GOES_ON) made = Py_NewRef(result);
  if (s->state == REFUSES) made = Py_NewRef(Py_NotImplemented);
  /* What goes may clear an exception: torch's record of the memory's history walks Python's frames. */
  PyObject *type = NULL, *error = NULL, *trace = NULL;
  if (s->state == RAISES) PyErr_Fetch(&type, &error, &trace);
  for (int i = 0; i < s->count; i++) Py_DECREF(s->held[i]);
  if (s->state == RAISES) PyErr_Restore(type, error, trace);
  return made;
}

/* ---- launching a compiled kernel ------------------------------------------------------------- */

/* cuLaunchKernel, hipModuleLaunchKernel. */
typedef int (*Driver)(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned tx,
                      unsigned ty, unsigned tz, unsigned shared, void *stream, void **parameters,
                      void **extra);

typedef struct {
  PyObject_HEAD vectorcallfunc vectorcall;
  Driver driver;
  void *function;
  unsigned threads, shared;
  int count;
  PyObject *entered;       /* gives a thread that has none the GPU's context; None */
  char kinds[MOST_VALUES]; /* of its values: P address, i l whole numbers of 32 and 64 bits, b h of
                              8 and 16, f d floats, x no parameter */
} Launcher;

static PyTypeObject LauncherType;

enum { NO_CONTEXT = 201 }; /* CUDA_ERROR_INVALID_CONTEXT */

/* A value as a parameter in memory; 0 with an exception where it is none. */
static int stored(char kind, PyObject *value, uint64_t *cell) {
  if (kind == 'x') return 1;
  if (kind == 'f' || kind == 'd') {
    double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred()) return 0;
    float narrow = (float)number;
    *cell = 0;
    if (kind == 'f')
      memcpy(cell, &narrow, sizeof narrow);
    else
      memcpy(cell, &number, sizeof number);
    return 1;
  }
  if (kind == 'P' && !PyLong_Check(value)) {
    PyObject *at = PyObject_CallMethodNoArgs(value, s_Tensor_data_ptr);
    if (!at) return 0;
    *cell = PyLong_AsUnsignedLongLong(at);
    Py_DECREF(at);
  } else if (kind == 'P') {
    *cell = PyLong_AsUnsignedLongLong(value);
  } else {
    int beyond = 0, bits = kind == 'b' ? 8 : kind == 'h' ? 16 : kind == 'i' ? 32 : 64;
    long long number = PyLong_AsLongLongAndOverflow(value, &beyond);
    /* Unsigned numbers come as large as their type holds. */
    if (bits == 64 && beyond > 0) {
      *cell = PyLong_AsUnsignedLongLong(value);
      return !PyErr_Occurred();
    }
    if (beyond || (bits < 64 && (number >= 1ll << bits || number < -(1ll << (bits - 1))))) {
      PyErr_Format(PyExc_OverflowError, "%R is no number of %d bits", value, bits);
      return 0;
    }
    *cell = (uint64_t)number;
  }
  return !PyErr_Occurred();
}

static int started(Launcher *self, const unsigned grid[3], uint64_t stream, uint64_t *cells) {
  void *parameters[MOST_VALUES + 2];
  uint64_t scratch[2] = {0, 0}; /* kernels that need some are not launched here */
  int count = 0, code;
  for (int i = 0; i < self->count; i++)
    if (self->kinds[i] != 'x') parameters[count++] = &cells[i];
  parameters[count] = &scratch[0], parameters[count + 1] = &scratch[1];
  if (!grid[0] || !grid[1] || !grid[2]) return 1;
  for (int again = 0;; again = 1) {
    Py_BEGIN_ALLOW_THREADS code =
        self->driver(self->function, grid[0], grid[1], grid[2], self->threads, 1, 1, self->shared,
                     (void *)(uintptr_t)stream, parameters, NULL);
    Py_END_ALLOW_THREADS if (code != NO_CONTEXT || again || self->entered == Py_None) break;
    PyObject *made = PyObject_CallNoArgs(self->entered);
    if (!made) return 0;
    Py_DECREF(made);
  }
  if (code) PyErr_Format(PyExc_RuntimeError, "the GPU's driver refused a launch: error %d", code);
  return !code;
}

/* launcher(grid x, y, z, stream, *values) */
static PyObject *launcher_call(PyObject *object, PyObject *const *args, size_t flags,
                               PyObject *names) {
  Launcher *self = (Launcher *)object;
  Py_ssize_t count = PyVectorcall_NARGS(flags);
  uint64_t cells[MOST_VALUES];
  unsigned grid[3];
  if (names || count != self->count + 4)
    return PyErr_Format(PyExc_TypeError, "a launch of %zd values; expected %d", count - 4,
                        self->count);
  for (int i = 0; i < 3; i++) {
    unsigned long size = PyLong_AsUnsignedLong(args[i]);
    if (PyErr_Occurred()) return NULL;
    if (size > UINT32_MAX) return PyErr_Format(PyExc_OverflowError, "a grid of %lu", size);
    grid[i] = (unsigned)size;
  }
  uint64_t stream = PyLong_AsUnsignedLongLong(args[3]);
  if (PyErr_Occurred()) return NULL;
  for (int i = 0; i < self->count; i++)
    if (!stored(self->kinds[i], args[i + 4], &cells[i])) return NULL;
  if (!started(self, grid, stream, cells)) return NULL;
  Py_RETURN_NONE;
}

/* Launcher(address of the driver's function, kernel, threads, bytes of shared memory, kinds, what
 * gives a thread the GPU's context or None) */
static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *names) {
  unsigned long long driver, function;
  unsigned threads, shared;
  const char *kinds;
  Py_ssize_t count;
  PyObject *entered = Py_None;
  if (!PyArg_ParseTuple(args, "KKIIs#|O", &driver, &function, &threads, &shared, &kinds, &count,
                        &entered))
    return NULL;
  if (count > MOST_VALUES || strspn(kinds, "Pilbhfdx") != (size_t)count)
    return PyErr_Format(PyExc_ValueError, "kinds %s", kinds);
  Launcher *self = (Launcher *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->vectorcall = launcher_call;
  self->driver = (Driver)(uintptr_t)driver, self->function = (void *)(uintptr_t)function;
  self->threads = threads, self->shared = shared, self->count = (int)count;
  self->entered = Py_NewRef(entered);
  memcpy(self->kinds, kinds, count);
  return (PyObject *)self;
}

static void launcher_dealloc(Launcher *self) {
  Py_XDECREF(self->entered);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef launcher_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Launcher, vectorcall), READONLY, NULL}, {0}};

static PyTypeObject LauncherType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sparse_bridge_native.Launcher",
    .tp_basicsize = sizeof(Launcher),
    .tp_dealloc = (destructor)launcher_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Launcher, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_members = launcher_members,
    .tp_new = launcher_new,
    .tp_doc = "A compiled kernel: launcher(grid x, grid y, grid z, stream, *values).",
};

/* ---- a gather-GEMM over one map -------------------------------------------------------------- */

/* What `GatherGemm` launches but for its operands; in its slot `native`. */
typedef struct {
  PyObject_HEAD Launcher *launcher;
  unsigned grid[3];
  PyObject *index;           /* of the GPU */
  PyObject *table;           /* whose memory it reads */
  PyObject *kinds[OPERANDS]; /* dtypes of the operands that are there, but x and y */
  struct {
    long long block_m, block_n, c_out, columns, w_stride;
  } spec;
  uint64_t cells[MOST_VALUES];
} Bound;

static void bound_dealloc(Bound *self) {
  Py_XDECREF(self->launcher);
  Py_XDECREF(self->index);
  Py_XDECREF(self->table);
  for (int i = 0; i < OPERANDS; i++) Py_XDECREF(self->kinds[i]);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject BoundType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sparse_bridge_native.Bound",
    .tp_basicsize = sizeof(Bound),
    .tp_dealloc = (destructor)bound_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "What a gather-GEMM over one map launches but for its operands.",
};

/* The same launch over another table, or over none. */
static Bound *bound_like(Scope *s, Bound *old, PyObject *table) {
  Bound *made = (Bound *)hold(s, BoundType.tp_alloc(&BoundType, 0));
  if (!made) return NULL;
  made->launcher = (Launcher *)Py_NewRef(old->launcher), made->index = Py_NewRef(old->index);
  made->table = Py_XNewRef(table);
  for (int i = 0; i < OPERANDS; i++) made->kinds[i] = Py_XNewRef(old->kinds[i]);
  memcpy(made->cells, old->cells, sizeof made->cells);
  memcpy(made->grid, old->grid, sizeof made->grid);
  made->spec = old->spec;
  return made;
}

/* The operands of an epilogue in the order of a launch. operands[0..8]: x, w, bias, mean, variance,
 * gain, shift, residual, y; NULL for what is absent. */
typedef struct {
  PyObject *tensors[OPERANDS];
  uint64_t at[OPERANDS];
} Operands;

/* The key of `GemmSpec.variants`, as `GatherGemm._started` makes it. */
static PyObject *variant_key(Scope *s, PyObject *product, Operands *o) {
  PyObject *kinds[OPERANDS] = {0}, *read = Py_None;
  int any = 0;
  for (int i = 2; i < OPERANDS - 1; i++) {
    kinds[i] = Py_None;
    if (!o->tensors[i]) continue;
    kinds[i] = GET(o->tensors[i], Tensor, dtype), any = 1;
  }
  PyObject *dtype = GET(o->tensors[1], Tensor, dtype), *key = GET(product, GatherGemm, _key);
  if (s->state != GOES_ON) return NULL;
  if (any)
    read = hold(
        s, PyTuple_Pack(7, Py_True, kinds[2], kinds[3], kinds[4], kinds[5], kinds[6], kinds[7]));
  return read ? hold(s, PyTuple_Pack(3, key, dtype, read)) : NULL;
}

/* `GatherGemm`'s launch made ready for such operands; NULL where Python launches its kernel. */
static Bound *bound_of(Scope *s, PyObject *product, Operands *o) {
  PyObject *spec = GET(product, GatherGemm, spec);
  refuse_unless(s, truth(s, GET(product, GatherGemm, _addressed)));
  PyObject *variants = GET(spec, GemmSpec, variants), *key = variant_key(s, product, o);
  refuse_unless(s, variants && PyDict_CheckExact(variants));
  PyObject *found = item(s, variants, key);
  refuse_unless(s, found && PyTuple_CheckExact(found) && PyTuple_GET_SIZE(found) == 2 &&
                       PyTuple_GET_ITEM(found, 1) == Py_None);
  if (s->state != GOES_ON) return NULL;
  PyObject *entry = PyTuple_GET_ITEM(found, 0), *launcher = PyTuple_GET_ITEM(entry, 0);
  PyObject *numbers = GET(product, GatherGemm, _numbers), *grid = GET(product, GatherGemm, grid);
  PyObject *index = GET(GET(spec, GemmSpec, device), Device, index),
           *constants = GET(spec, GemmSpec, constants);
  refuse_unless(s, Py_IS_TYPE(launcher, &LauncherType) && numbers && PyTuple_CheckExact(numbers) &&
                       constants && PyTuple_CheckExact(constants) && grid &&
                       PyTuple_CheckExact(grid) && PyTuple_GET_SIZE(grid) == 3);
  if (s->state != GOES_ON) return NULL;
  Launcher *kernel = (Launcher *)launcher;
  Py_ssize_t count = PyTuple_GET_SIZE(numbers);
  refuse_unless(s, OPERANDS + count + PyTuple_GET_SIZE(constants) == kernel->count);
  if (s->state != GOES_ON) return NULL;
  Bound *made = (Bound *)hold(s, BoundType.tp_alloc(&BoundType, 0));
  if (!made) return NULL;
  made->launcher = (Launcher *)Py_NewRef(launcher), made->index = Py_NewRef(index);
  made->table = Py_XNewRef(GET(product, GatherGemm, table));
  for (int i = 0; i < 3; i++) made->grid[i] = (unsigned)number(s, PyTuple_GET_ITEM(grid, i));
  for (Py_ssize_t i = 0; i < count && s->state == GOES_ON; i++)
    if (!stored(kernel->kinds[OPERANDS + i], PyTuple_GET_ITEM(numbers, i),
                &made->cells[OPERANDS + i]))
      s->state = RAISES;
  for (int i = 1; i < OPERANDS - 1; i++)
    if (o->tensors[i]) made->kinds[i] = Py_XNewRef(GET(o->tensors[i], Tensor, dtype));
  PyObject *tile = GET(spec, GemmSpec, tile);
  made->spec.block_m = number(s, GET(tile, TileConfig, block_m));
  made->spec.block_n = number(s, GET(tile, TileConfig, block_n));
  made->spec.c_out = number(s, GET(spec, GemmSpec, c_out));
  made->spec.columns = number(s, GET(spec, GemmSpec, columns));
  made->spec.w_stride = number(s, GET(spec, GemmSpec, w_stride));
  /* The spec lives longer than the map; a table that starts anywhere has a kernel of its own. */
  if (truth(s, GET(spec, GemmSpec, packed)) ||
      equal(s, GET(product, GatherGemm, _key), GET(spec, GemmSpec, key)))
    set(s, spec, s_GemmSpec_native, (PyObject *)bound_like(s, made, NULL));
  set(s, product, s_GatherGemm_native, (PyObject *)made);
  return s->state == GOES_ON ? made : NULL;
}

/* Whether operands are there and of the dtypes that it was made for. */
static int bound_fits(Scope *s, Bound *bound, Operands *o) {
  for (int i = 1; i < OPERANDS - 1 && s->state == GOES_ON; i++) {
    if (!o->tensors[i] != !bound->kinds[i]) return 0;
    if (o->tensors[i] && GET(o->tensors[i], Tensor, dtype) != bound->kinds[i]) return 0;
  }
  return s->state == GOES_ON;
}

/* `launch.begin`: whether a launch would run on that GPU and nobody listens to launches. */
static int may_launch(Scope *s, PyObject *index) {
  PyObject *hook = GET(g_hooks, hooks, launch_enter_hook);
  if (hook && hook != Py_None && s->state == GOES_ON) {
    PyObject *calls = PyObject_GetAttr(hook, s_HookChain_calls);
    if (!calls)
      PyErr_Clear(), s->state = REFUSES;
    else
      refuse_unless(s, !truth(s, hold(s, calls)));
  }
  refuse_unless(s, idle(s, g_precompile, s_precompile_dry_runs));
  refuse_unless(s, equal(s, asked(s, s_torch_c__cuda_getDevice), index));
  return s->state == GOES_ON;
}

/* Where the operands are; whether all start at multiples of 16 bytes. */
static int located(Scope *s, Operands *o) {
  uint64_t any = 0;
  for (int i = 0; i < OPERANDS; i++) {
    o->at[i] = 0;
    PyObject *at = o->tensors[i] ? CALL(o->tensors[i], Tensor, data_ptr) : NULL;
    if (at) any |= o->at[i] = PyLong_AsUnsignedLongLong(at);
  }
  return s->state == GOES_ON && !(any & 15);
}

/* Run it: 1 where that is done, 0 where Python has to. */
static int launched_bound(Scope *s, Bound *bound, Operands *o, PyObject *stream) {
  if (!bound || s->state != GOES_ON || !may_launch(s, bound->index)) {
    if (s->state == REFUSES) s->state = GOES_ON;
    return 0;
  }
  uint64_t cells[MOST_VALUES], on = PyLong_AsUnsignedLongLong(stream);
  memcpy(cells, bound->cells, sizeof cells);
  for (int i = 0; i < OPERANDS; i++) cells[i] = o->at[i] ? o->at[i] : o->at[OPERANDS - 1];
  if (PyErr_Occurred() || !started(bound->launcher, bound->grid, on, cells)) s->state = RAISES;
  return s->state == GOES_ON;
}

/* `GatherGemm.__call__`: 1 where it was launched, 0 where Python's has to be called. */
static int launched_product(Scope *s, PyObject *product, Operands *o, PyObject *stream) {
  int known = Py_IS_TYPE(product, (PyTypeObject *)g_GatherGemm) ||
              Py_IS_TYPE(product, (PyTypeObject *)g_NarrowGemm);
  if (!known || !located(s, o)) return 0;
  PyObject *held = slot(s, product, (PyObject *)Py_TYPE(product), o_GatherGemm_native);
  Bound *bound = held && Py_IS_TYPE(held, &BoundType) ? (Bound *)held : NULL;
  if (!bound || !bound_fits(s, bound, o)) bound = bound_of(s, product, o);
  if (s->state == REFUSES) s->state = GOES_ON, bound = NULL;
  return launched_bound(s, bound, o, stream);
}

/* ---- the plan of a layer with what follows it ----------------------------------------------- */

/* How products of a plan go over maps: BY_PYTHON, as that decides; OVER_TILES, or where there are
 * none over the table of maps with rows below a bound; OVER_TABLE of those. No bound is negative. */

/* What of a map's size the choice of a tile looks at. */
typedef struct {
  long long flow, reverse, tiles, bits, much;
} Size;

#define SIZES 6 /* that a plan remembers the launches of */

/* `FusedPlan` for this file; in its slot `native`. */
typedef struct {
  PyObject_HEAD PyObject *product; /* GatherProduct; NULL where its launch is Python's */
  PyObject *keys[2];               /* of it in rulebooks, by side */
  PyObject *bound[2];              /* of its `Bound` there */
  PyObject *tuned;                 /* layers that groups decide about; None where that is unknown */
  PyObject *specs;                 /* of it, by dataflow, direction and size of the map */
  PyObject *form, *between, *vectors, *read, *same, *n_offsets, *regular, *device, *activation;
  PyObject *steps, *columns, *likes[SIZES];
  Size sizes[SIZES];                               /* of maps: of the likes, Bound */
  long long generation, units, few_rows, below[2]; /* below: rows of maps of few rows, of others */
  int at_the_call, flow;                           /* see above */
  unsigned next;
} Known;

static int known_traverse(Known *self, visitproc visit, void *arg) {
  for (PyObject **at = &self->product; at < self->likes + SIZES; at++) Py_VISIT(*at);
  return 0;
}

static int known_clear(Known *self) {
  for (PyObject **at = &self->product; at < self->likes + SIZES; at++) Py_CLEAR(*at);
  return 0;
}

static void known_dealloc(Known *self) {
  PyObject_GC_UnTrack(self);
  known_clear(self);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Known(*objects in the order above, generation, units, at_the_call, flow, few_rows, below[0],
 * below[1]), see `FusedPlan`. read:
 * what its epilogue reads.  units: compute units of the GPU. */
static PyObject *known_new(PyTypeObject *type, PyObject *args, PyObject *names) {
  enum { OBJECTS = (offsetof(Known, columns) - offsetof(Known, product)) / sizeof(PyObject *) + 1 };
  if (PyTuple_GET_SIZE(args) != OBJECTS + 7 || names)
    return PyErr_Format(PyExc_TypeError, "Known takes %d values, got %zd", OBJECTS + 7,
                        PyTuple_GET_SIZE(args));
  Known *self = (Known *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  PyObject **to = &self->product;
  for (int i = 0; i < OBJECTS; i++) {
    PyObject *value = PyTuple_GET_ITEM(args, i);
    to[i] = i == 0 && value == Py_None ? NULL : Py_NewRef(value);
  }
  self->generation = PyLong_AsLongLong(PyTuple_GET_ITEM(args, OBJECTS));
  self->units = PyLong_AsLongLong(PyTuple_GET_ITEM(args, OBJECTS + 1));
  self->at_the_call = PyObject_IsTrue(PyTuple_GET_ITEM(args, OBJECTS + 2));
  self->flow = (int)PyLong_AsLong(PyTuple_GET_ITEM(args, OBJECTS + 3));
  self->few_rows = PyLong_AsLongLong(PyTuple_GET_ITEM(args, OBJECTS + 4));
  for (int i = 0; i < 2; i++)
    self->below[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(args, OBJECTS + 5 + i));
  if (PyErr_Occurred() || !PyTuple_Check(self->between) || PyTuple_GET_SIZE(self->between) != 5 ||
      !PyTuple_CheckExact(self->vectors) || !PyTuple_CheckExact(self->read) ||
      PyTuple_GET_SIZE(self->read) != 6 || !PyDict_CheckExact(self->specs)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "Known takes the parts of a FusedPlan");
    Py_DECREF(self);
    return NULL;
  }
  return (PyObject *)self;
}

static PyTypeObject KnownType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sparse_bridge_native.Known",
    .tp_basicsize = sizeof(Known),
    .tp_dealloc = (destructor)known_dealloc,
    .tp_traverse = (traverseproc)known_traverse,
    .tp_clear = (inquiry)known_clear,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = known_new,
    .tp_doc = "The plan of a layer with what follows it.",
};

#include "map_side.c"

/* `GatherProduct._bind` of a map whose tiles are there, with a spec that has been launched before;
 * NULL in a scope that goes on where Python has to. */
static Bound *bound_over(Scope *s, Known *plan, PyObject *rulebook, int side, PyObject *held,
                         Operands *o) {
  MapSide m = {.rulebook = rulebook, .side = side};
  read_side(s, &m);
  int flow = view_for(s, plan, &m);
  Bound *like = s->state == GOES_ON ? spec_for(s, plan, &m, flow) : NULL, *made = NULL;
  if (like && !bound_fits(s, like, o)) {
    for (int i = 0; i < SIZES; i++) Py_CLEAR(plan->likes[i]); /* another may be made since */
    refuse_unless(s, 0);
  }
  refuse_unless(s, number(s, CALL(CALL(o->tensors[0], Tensor, untyped_storage), Storage, nbytes)) <
                       1ll << 31);
  if (s->state == GOES_ON) made = bound_like(s, like, m.view.object);
  if (made) placed(s, like, &m, flow, &made->cells[OPERANDS], &made->grid[0]);
  noticed(s, &m, flow == OVER_TILES);
  if (s->state == GOES_ON && PyDict_SetItem(held, plan->bound[side], (PyObject *)made) < 0)
    s->state = RAISES;
  if (s->state == REFUSES) s->state = GOES_ON, made = NULL;
  return s->state == GOES_ON ? made : NULL;
}

/* The stream of a launch over a map, which has waited for it. */
static PyObject *stream_of(Scope *s, PyObject *rulebook) {
  PyObject *order = GET(rulebook, Rulebook, order);
  if (s->state != GOES_ON || order == Py_None) return zero;
  PyObject *number = SLOT(order, StreamOrder, number), *waited = SLOT(order, StreamOrder, waited);
  PyObject *stream = number ? hold(s, PyObject_CallNoArgs(number)) : NULL;
  int there = s->state == GOES_ON ? PySequence_Contains(waited, stream) : 0;
  if (there < 0) s->state = RAISES;
  refuse_unless(s, there);
  return stream;
}

/* The launch of a plan over a map, by Python. */
static PyObject *by_python(Scope *s, Known *plan, PyObject *rulebook, int side, PyObject *held,
                           Operands *o, PyObject *stream) {
  PyObject *x = o->tensors[0], *weight = o->tensors[1], *y = o->tensors[OPERANDS - 1];
  PyObject *vectors = Py_None, *six[6];
  int any = 0;
  for (int i = 0; i < 6; i++)
    six[i] = o->tensors[2 + i] ? o->tensors[2 + i] : Py_None, any |= six[i] != Py_None;
  if (any) vectors = hold(s, PyTuple_Pack(6, six[0], six[1], six[2], six[3], six[4], six[5]));
  if (!vectors) return NULL;
  PyObject *launch = item(s, held, plan->keys[side]);
  if (!launch) {
    PyObject *inputs = hold(s, PyTuple_Pack(3, x, weight, vectors));
    if (!inputs) return NULL;
    launch = hold(s, PyObject_CallMethodObjArgs(plan->product, s_GatherProduct__bind, rulebook,
                                                side ? one : zero, inputs, NULL));
    if (launch && PyDict_SetItem(held, plan->keys[side], launch) < 0) s->state = RAISES;
  }
  if (s->state != GOES_ON) return NULL;
  if (launched_product(s, launch, o, stream)) return y;
  if (s->state != GOES_ON) return NULL;
  return hold(s, PyObject_CallFunctionObjArgs(launch, x, weight, vectors, y, NULL));
}

/* `GatherProduct.over` of a plan: the result. NULL in a scope that refuses where nothing ran.
 * bias, residual: NULL for none. */
static PyObject *computed(Scope *s, Known *plan, PyObject *x, PyObject *weight, PyObject *rulebook,
                          int side, PyObject *bias, PyObject *residual) {
  PyObject *product = plan->product, *ends = GET(rulebook, Rulebook, rows);
  refuse_unless(s, product && ends && PyTuple_CheckExact(ends) && PyTuple_GET_SIZE(ends) == 2);
  if (s->state != GOES_ON) return NULL;
  long long n_rows = rows_of_end(s, ends, side), n_in = rows_of_end(s, ends, 1 - side);
  refuse_unless(s, n_rows > 0 && n_in > 0);
  PyObject *stream = stream_of(s, rulebook);
  PyObject *held = SLOT(GET(rulebook, Rulebook, cache), Derived, _entries);
  PyObject *copied = SLOT(product, GatherProduct, _copied);
  refuse_unless(s, held && PyDict_CheckExact(held));
  if (s->state == GOES_ON && copied != Py_None)
    weight = hold(s, PyObject_CallMethodOneArg(copied, s_WeightLayout_rows_of, weight));
  if (s->state != GOES_ON) return NULL;
  Operands o = {{x, weight, bias}, {0}};
  for (int i = 1; i < 5; i++) {
    PyObject *vector = PyTuple_GET_ITEM(plan->read, i);
    o.tensors[2 + i] = vector == Py_None ? NULL : vector;
  }
  o.tensors[7] = residual;
  PyObject *capacity = FIELD(PyTuple_GET_ITEM(ends, side), Rows, capacity);
  PyObject *y =
      hold(s, PyObject_CallMethodObjArgs(x, s_Tensor_new_empty, capacity, plan->columns, NULL));
  o.tensors[OPERANDS - 1] = y;
  if (!y) return NULL;
  PyObject *known = item(s, held, plan->bound[side]);
  Bound *bound = NULL;
  if (located(s, &o)) {
    if (known && Py_IS_TYPE(known, &BoundType) && bound_fits(s, (Bound *)known, &o))
      bound = (Bound *)known;
    else if (s->state == GOES_ON && !PyDict_GetItemWithError(held, plan->keys[side]))
      bound = bound_over(s, plan, rulebook, side, held, &o);
  }
  if (launched_bound(s, bound, &o, stream)) return y;
  return s->state == GOES_ON ? by_python(s, plan, rulebook, side, held, &o, stream) : NULL;
}

/* ---- deferred convolutions ------------------------------------------------------------------- */

static PyObject *empty_of(Scope *s, PyObject *type) {
  return s->state == GOES_ON ? hold(s, ((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0))
                             : NULL;
}

/* DeferredConv(call, epilogue, steps, count) */
static PyObject *deferred(Scope *s, PyObject *layer_call, PyObject *epilogue, PyObject *steps,
                          long long count) {
  PyObject *made = empty_of(s, g_DeferredConv), *counted = hold(s, PyLong_FromLongLong(count));
  if (s->state != GOES_ON) return NULL;
  PUT(made, DeferredConv, call, layer_call), PUT(made, DeferredConv, epilogue, epilogue);
  PUT(made, DeferredConv, steps, steps), PUT(made, DeferredConv, _used, zero),
      PUT(made, DeferredConv, _count, counted);
  PUT(made, DeferredConv, result, Py_None), PUT(made, DeferredConv, fallback, Py_None),
      PUT(made, DeferredConv, _version, zero);
  return s->state == GOES_ON ? made : NULL;
}

static long long changes(Scope *s, PyObject *tensor) {
  return tensor && tensor != Py_None ? number(s, GET(tensor, Tensor, _version)) : 0;
}

/* `fused_plan.same` */
static int is_norm_of(Scope *s, PyObject *norm, PyObject *other) {
  if (!PyTuple_Check(norm) || !PyTuple_Check(other)) return 0;
  for (int i = i_Norm_mean; i < i_Norm_eps; i++)
    if (PyTuple_GET_ITEM(norm, i) != PyTuple_GET_ITEM(other, i)) return 0;
  return equal(s, FIELD(norm, Norm, eps), FIELD(other, Norm, eps));
}

static int is_plain(PyObject *tensor) {
  return Py_IS_TYPE(tensor, (PyTypeObject *)g_Tensor) ||
         Py_IS_TYPE(tensor, (PyTypeObject *)g_Parameter);
}

/* The History of a layer in `histories`; NULL where it has none. */
static PyObject *history_of(Scope *s, PyObject *owner) {
  PyObject *key = hold(s, PyLong_FromVoidPtr(owner));
  PyObject *found = item(s, g_histories, key);
  if (!found || !PyTuple_CheckExact(found)) return NULL;
  PyObject *alive = hold(s, PyObject_CallNoArgs(PyTuple_GET_ITEM(found, 0)));
  return alive == owner ? hold(s, Py_NewRef(PyTuple_GET_ITEM(found, 1))) : NULL;
}

/* An Epilogue with another bias. */
static PyObject *with_bias(Scope *s, PyObject *epilogue, PyObject *bias) {
  PyObject *replace = GET(epilogue, Epilogue, _replace);
  PyObject *names = hold(s, PyTuple_Pack(1, s_Epilogue_bias));
  return s->state == GOES_ON ? hold(s, PyObject_Vectorcall(replace, &bias, 0, names)) : NULL;
}

/* What all calls that a plan answers have in common: modes, guards, the map. */
static void checked(Scope *s, Known *plan, PyObject *x, PyObject *weight, PyObject *rulebook,
                    int side, PyObject *kmap, PyObject *bias) {
  refuse_unless(s, unset(s, s_torch_c__is_any_autocast_enabled) &&
                       unset(s, s_torch_c__len_torch_function_stack));
  refuse_unless(s,
                number(s, PyDict_GetItemWithError(g_forward_ad, s_forward_ad__current_level)) < 0);
  refuse_unless(s, idle(s, g_override, s_override_inside) && idle(s, g_trace, s_trace_recorders));
  refuse_unless(s,
                GET(kmap, KernelMap, x_fold) == Py_None && GET(kmap, KernelMap, y_fold) == Py_None);
  if (s->state != GOES_ON) return;
  PyObject *operands[8] = {x, weight};
  Py_ssize_t count = 2, vectors = PyTuple_GET_SIZE(plan->vectors);
  if (bias) operands[count++] = bias;
  if (vectors > 4) s->state = REFUSES;
  for (Py_ssize_t i = 0; i < vectors && i < 4; i++)
    operands[count++] = PyTuple_GET_ITEM(plan->vectors, i);
  refuse_unless(s, truth(s, hold(s, PyObject_Vectorcall(plan->same, operands, count, NULL))));
  refuse_unless(s, equal(s, GET(rulebook, Rulebook, n_offsets), plan->n_offsets) &&
                       GET(rulebook, Rulebook, regular) == plan->regular);
  refuse_unless(s, equal(s, GET(rulebook, Rulebook, device), plan->device));
  PyObject *n_rows = GET(rulebook, Rulebook, n_rows), *shape = GET(x, Tensor, shape);
  refuse_unless(s, n_rows && shape &&
                       equal(s, PyTuple_GET_ITEM(shape, 0), PyTuple_GET_ITEM(n_rows, 1 - side)));
}

/* `layers.known_call`(owner, x, weight, kmap, epilogue, form) */
static PyObject *known_call(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  SCOPE(s);
  if (count != 6 || declined()) Py_RETURN_NOTIMPLEMENTED;
  PyObject *owner = args[0], *x = args[1], *weight = args[2], *kmap = args[3], *epilogue = args[4];
  PyObject *history = history_of(s, owner);
  if (!history || !PyTuple_Check(epilogue)) return ended(s, NULL);
  PyObject *bias = FIELD(epilogue, Epilogue, bias),
           *activation = FIELD(epilogue, Epilogue, activation);
  PyObject *norm = FIELD(epilogue, Epilogue, norm), *form = args[5];
  int whole = activation != Py_None;
  PyObject *fused = whole ? SLOT(history, History, full_plan) : SLOT(history, History, plan);
  refuse_unless(s, fused && fused != Py_None && FIELD(epilogue, Epilogue, residual) == Py_None);
  PyObject *held = SLOT(fused, FusedPlan, native);
  refuse_unless(s, held && Py_IS_TYPE(held, &KnownType));
  if (s->state != GOES_ON) return ended(s, NULL);
  Known *plan = (Known *)held;
  refuse_unless(s, number(s, PyDict_GetItemWithError(g_settings, s_settings_generation)) ==
                       plan->generation);
  refuse_unless(s, Py_IS_TYPE(kmap, (PyTypeObject *)g_KernelMap) && equal(s, form, plan->form));
  PyObject *between = plan->between, *usual = FIELD(between, Epilogue, bias);
  refuse_unless(s, (bias == Py_None) == (usual == Py_None));
  PyObject *end = FIELD(between, Epilogue, norm);
  if (norm != Py_None) refuse_unless(s, is_norm_of(s, norm, end));
  if (bias == Py_None) bias = NULL;
  PyObject *rulebook = GET(kmap, KernelMap, rulebook), *flipped = GET(kmap, KernelMap, flipped);
  int side = truth(s, flipped);
  checked(s, plan, x, weight, rulebook, side, kmap, bias);
  if (s->state != GOES_ON) return ended(s, NULL);
  if (whole) {
    refuse_unless(
        s, equal(s, PyTuple_GET_ITEM(plan->activation, 0), activation) &&
               equal(s, PyTuple_GET_ITEM(plan->activation, 1), FIELD(epilogue, Epilogue, alpha)));
    refuse_unless(s, (norm == Py_None) == (end == Py_None));
    if (s->state != GOES_ON) return ended(s, NULL);
    return ended(s, computed(s, plan, x, weight, rulebook, side, bias, NULL));
  }
  PyObject *done = norm == Py_None ? hold(s, PyUnicode_New(0, 0)) : Py_NewRef(letters[0]);
  if (norm != Py_None) hold(s, done);
  refuse_unless(s, !truth(s, SLOT(history, History, disabled)));
  refuse_unless(s, equal(s, SLOT(history, History, seen), plan->steps));
  PyObject *ends = GET(rulebook, Rulebook, rows), *cuda = GET(x, Tensor, is_cuda);
  if (s->state != GOES_ON) return ended(s, NULL);
  PyObject *rows = PyTuple_GET_ITEM(ends, side);
  PyObject *least = PyDict_GetItemWithError(g_convolution, s_convolution_MIN_DEFERRED_ELEMENTS);
  refuse_unless(s, least && PyList_CheckExact(least) && FIELD(rows, Rows, device) == Py_None);
  if (s->state != GOES_ON) return ended(s, NULL);
  refuse_unless(s, number(s, FIELD(rows, Rows, capacity)) * number(s, plan->columns) >=
                       number(s, PyList_GET_ITEM(least, cuda == Py_True)));
  PyObject *device = GET(x, Tensor, device), *stream = NULL;
  if (cuda == Py_True)
    stream = stream_on(s, device);
  else if (s->state == GOES_ON)
    stream = hold(s, PyLong_FromLong(-1));
  /* What follows changes the history: nothing is refused from here on. */
  PyObject *y = Py_None;
  if (s->state == GOES_ON && plan->at_the_call)
    y = computed(s, plan, x, weight, rulebook, side, bias, NULL);
  if (!y) return ended(s, NULL);
  PyObject *layer_call = empty_of(s, g_LayerCall);
  PyObject *n_rows = GET(rulebook, Rulebook, n_rows);
  if (s->state != GOES_ON) return ended(s, NULL);
  PyObject *shape = hold(s, PyTuple_Pack(2, PyTuple_GET_ITEM(n_rows, side), plan->columns));
  PyObject *operands = hold(s, PyTuple_Pack(4, x, weight, kmap, form));
  if (s->state == GOES_ON && bias && bias != usual) { /* a view of it, made anew at every call */
    between = with_bias(s, between, bias);
  }
  long long moved = 0, counted = changes(s, x) + changes(s, weight) + changes(s, bias);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plan->vectors); i++)
    moved += changes(s, PyTuple_GET_ITEM(plan->vectors, i));
  PyObject *changed = hold(s, PyLong_FromLongLong(moved));
  if (s->state != GOES_ON || !stream) return ended(s, NULL);
  PUT(layer_call, LayerCall, operands, operands), PUT(layer_call, LayerCall, shape, shape);
  PUT(layer_call, LayerCall, history, history), PUT(layer_call, LayerCall, target, plan->steps);
  PUT(layer_call, LayerCall, fused, fused), PUT(layer_call, LayerCall, launched, y);
  PUT(layer_call, LayerCall, dtype, GET(x, Tensor, dtype)),
      PUT(layer_call, LayerCall, device, device);
  PUT(layer_call, LayerCall, stream, stream), PUT(layer_call, LayerCall, between, between);
  PUT(layer_call, LayerCall, changes, changed);
  PUT(history, History, seen, done), PUT(history, History, alone, zero);
  if (norm != Py_None) counted += moved;
  return ended(s, deferred(s, layer_call, epilogue, done, counted));
}

/* `features.features_of` of a deferred convolution whose steps are known. */
static PyObject *features(Scope *s, PyObject *conv) {
  PyObject *layer_call = SLOT(conv, DeferredConv, call),
           *shape = SLOT(layer_call, LayerCall, shape);
  PyObject *dtype = SLOT(layer_call, LayerCall, dtype),
           *device = SLOT(layer_call, LayerCall, device);
  PyObject *target = SLOT(layer_call, LayerCall, target);
  refuse_unless(s, target && PyUnicode_Check(target) && PyUnicode_GET_LENGTH(target) > 0 &&
                       SLOT(conv, DeferredConv, result) == Py_None);
  if (s->state != GOES_ON) return NULL;
  PyObject *args[] = {
      g_UnlaunchedFeatures, shape, Py_None, Py_None, Py_None, dtype, g_strided, device};
  PyObject *made = hold(s, PyObject_Vectorcall(g_make_wrapper, args, 8, NULL));
  if (made) hold(s, PyObject_CallOneArg(g_no_memory, made));
  set(s, made, s_UnlaunchedFeatures_conv, conv);
  return s->state == GOES_ON ? made : NULL;
}

/* `features.features_of`, by Python where it is not repeated here. */
static PyObject *features_alone(Scope *s, PyObject *conv) {
  PyObject *made = features(s, conv);
  if (s->state != REFUSES) return made;
  s->state = GOES_ON;
  return hold(s, PyObject_CallOneArg(g_features_of, conv));
}

/* `features.features_of` of a deferred convolution. */
static PyObject *features_of(PyObject *module, PyObject *conv) {
  SCOPE(s);
  if (!Py_IS_TYPE(conv, (PyTypeObject *)g_DeferredConv) || declined()) Py_RETURN_NOTIMPLEMENTED;
  return ended(s, features(s, conv));
}

/* A deferred convolution, or the one whose features a tensor is, which nobody has read or followed,
 * and the call of its layer, launched by a plan. */
typedef struct {
  PyObject *conv, *call, *history, *target, *steps;
  Known *plan;
  Py_ssize_t at;
  int as_tensor;
} Following;

/* `DeferredConv._is_expected`, `LayerCall.undisturbed`: refuses where they say no. */
static Following following(Scope *s, PyObject *input) {
  Following f = {0};
  if (Py_IS_TYPE(input, (PyTypeObject *)g_DeferredConv)) {
    f.conv = input;
  } else {
    refuse_unless(s, Py_IS_TYPE(input, (PyTypeObject *)g_UnlaunchedFeatures));
    f.conv = GET(input, UnlaunchedFeatures, conv), f.as_tensor = 1;
  }
  refuse_unless(s, f.conv && Py_IS_TYPE(f.conv, (PyTypeObject *)g_DeferredConv));
  f.call = SLOT(f.conv, DeferredConv, call);
  PyObject *fused = SLOT(f.call, LayerCall, fused);
  refuse_unless(s, fused && fused != Py_None);
  PyObject *held = SLOT(fused, FusedPlan, native);
  refuse_unless(s, held && Py_IS_TYPE(held, &KnownType));
  f.plan = (Known *)held, f.history = SLOT(f.call, LayerCall, history);
  f.target = SLOT(f.call, LayerCall, target), f.steps = SLOT(f.conv, DeferredConv, steps);
  refuse_unless(s, equal(s, SLOT(f.conv, DeferredConv, _used), zero) &&
                       SLOT(f.conv, DeferredConv, result) == Py_None);
  refuse_unless(s, unset(s, s_torch_c_is_grad_enabled) &&
                       unset(s, s_torch_c_is_inference_mode_enabled) &&
                       unset(s, s_torch_c__len_torch_function_stack) &&
                       unset(s, s_torch_c__len_torch_dispatch_stack));
  PyObject *stream = SLOT(f.call, LayerCall, stream);
  if (number(s, stream) >= 0) {
    PyObject *here = stream_on(s, SLOT(f.call, LayerCall, device));
    refuse_unless(s, equal(s, here, stream));
  }
  if (s->state == GOES_ON) f.at = PyUnicode_GET_LENGTH(f.steps);
  return f;
}

static int comes(Following *f, char step) {
  return f->at < PyUnicode_GET_LENGTH(f->target) &&
         PyUnicode_READ_CHAR(f->target, f->at) == (Py_UCS4)step;
}

/* `LayerCall.take_launched`: what was launched, once all steps have come. */
static PyObject *taken(Scope *s, Following *f, PyObject *steps) {
  PyObject *y = SLOT(f->call, LayerCall, launched);
  refuse_unless(s, y && y != Py_None);
  PUT(f->call, LayerCall, launched, Py_None);
  PUT(f->history, History, seen, steps), PUT(f->conv, DeferredConv, _used, two);
  return s->state == GOES_ON ? y : NULL;
}

/* `shortcuts._is_norm` */
static int is_norm(Scope *s, PyObject *module, PyObject *norm) {
  PyObject *dict = GET(module, Object, __dict__);
  PyObject *own = GET((PyObject *)Py_TYPE(module), BatchNorm1d, forward);
  if (s->state != GOES_ON || own != g_norm_forward || !PyDict_CheckExact(dict)) return 0;
  PyObject *buffers = PyDict_GetItemWithError(dict, s_BatchNorm1d__buffers);
  PyObject *parameters = PyDict_GetItemWithError(dict, s_BatchNorm1d__parameters);
  if (PyDict_GetItemWithError(dict, s_BatchNorm1d_training) != Py_False || !buffers || !parameters)
    return 0;
  if (!PyDict_Check(buffers) || !PyDict_Check(parameters)) return 0;
  PyObject *have[] = {PyDict_GetItemWithError(buffers, s_NormVectors_running_mean),
                      PyDict_GetItemWithError(buffers, s_NormVectors_running_var),
                      PyDict_GetItemWithError(parameters, s_NormVectors_weight),
                      PyDict_GetItemWithError(parameters, s_NormVectors_bias)};
  for (int i = 0; i < 4; i++)
    if ((have[i] ? have[i] : Py_None) != PyTuple_GET_ITEM(norm, i)) return 0;
  PyObject *eps = PyDict_GetItemWithError(dict, s_BatchNorm1d_eps);
  return eps && equal(s, eps, FIELD(norm, Norm, eps));
}

/* `DeferredConv.as_launched` behind a norm(BatchNorm1d or Norm, convolution or its features): what
 * follows, in kind. */
static PyObject *normalised(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  SCOPE(s);
  if (count != 2) Py_RETURN_NOTIMPLEMENTED;
  Following f = following(s, args[1]);
  PyObject *between = SLOT(f.call, LayerCall, between);
  refuse_unless(s, between && f.at == 0);
  if (s->state != GOES_ON) return ended(s, NULL);
  PyObject *norm = FIELD(between, Epilogue, norm);
  refuse_unless(s, norm != Py_None && comes(&f, STEP_NORM));
  if (s->state != GOES_ON) return ended(s, NULL);
  int same = PyTuple_Check(args[0]) ? is_norm_of(s, args[0], norm) : is_norm(s, args[0], norm);
  refuse_unless(s, same);
  long long moved = 0;
  for (int i = 0; i < 4 && s->state == GOES_ON; i++) moved += changes(s, PyTuple_GET_ITEM(norm, i));
  refuse_unless(s, moved == number(s, SLOT(f.call, LayerCall, changes)));
  if (s->state != GOES_ON) return ended(s, NULL);
  if (PyUnicode_GET_LENGTH(f.target) == 1) return ended(s, taken(s, &f, letters[0]));
  long long counted = number(s, SLOT(f.conv, DeferredConv, _count));
  PyObject *made = deferred(s, f.call, between, letters[0], counted + moved);
  if (f.as_tensor) made = features(s, made);
  PUT(f.history, History, seen, letters[0]), PUT(f.conv, DeferredConv, _used, two);
  return ended(s, made);
}

/* `DeferredConv.end_launched` behind an activation(convolution or its features, name, slope): the
 * result. */
static PyObject *activated(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  SCOPE(s);
  if (count != 3) Py_RETURN_NOTIMPLEMENTED;
  Following f = following(s, args[0]);
  if (s->state != GOES_ON) return ended(s, NULL);
  refuse_unless(s, comes(&f, STEP_ACTIVATION) && f.at + 1 == PyUnicode_GET_LENGTH(f.target));
  PyObject *name = PyTuple_GET_ITEM(f.plan->activation, 0);
  refuse_unless(s, equal(s, name, args[1]) &&
                       equal(s, PyTuple_GET_ITEM(f.plan->activation, 1), args[2]));
  return ended(s, s->state == GOES_ON ? taken(s, &f, f.target) : NULL);
}

/* `DeferredConv.plus`(convolution or its features, a plain tensor): what follows, in kind, or the
 * result. */
static PyObject *plus(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  SCOPE(s);
  if (count != 2) Py_RETURN_NOTIMPLEMENTED;
  Following f = following(s, args[0]);
  PyObject *other = args[1];
  if (s->state != GOES_ON) return ended(s, NULL);
  refuse_unless(s, comes(&f, STEP_SUM) && is_plain(other));
  refuse_unless(s, equal(s, GET(other, Tensor, shape), SLOT(f.call, LayerCall, shape)) &&
                       GET(other, Tensor, dtype) == SLOT(f.call, LayerCall, dtype) &&
                       equal(s, GET(other, Tensor, device), SLOT(f.call, LayerCall, device)) &&
                       !truth(s, CALL(other, Tensor, is_inference)) &&
                       truth(s, CALL(other, Tensor, is_contiguous)));
  PyObject *operands = SLOT(f.call, LayerCall, operands);
  PyObject *between = SLOT(f.call, LayerCall, between);
  PyObject *epilogue = SLOT(f.conv, DeferredConv, epilogue);
  refuse_unless(s, operands && between && epilogue);
  if (s->state != GOES_ON) return ended(s, NULL);
  PyObject *x = PyTuple_GET_ITEM(operands, 0), *weight = PyTuple_GET_ITEM(operands, 1);
  PyObject *kmap = PyTuple_GET_ITEM(operands, 2), *bias = FIELD(between, Epilogue, bias);
  PyObject *norm = FIELD(epilogue, Epilogue, norm);
  /* `history.changes_of`: nothing that the launch reads was changed in place since. */
  long long counted = changes(s, x) + changes(s, weight);
  counted += changes(s, FIELD(epilogue, Epilogue, bias));
  for (int i = 0; i < 4 && norm != Py_None && s->state == GOES_ON; i++)
    counted += changes(s, PyTuple_GET_ITEM(norm, i));
  refuse_unless(s, counted == number(s, SLOT(f.conv, DeferredConv, _count)));
  PyObject *rulebook = GET(kmap, KernelMap, rulebook);
  int side = truth(s, GET(kmap, KernelMap, flipped));
  if (s->state != GOES_ON) return ended(s, NULL);
  PyObject *y =
      computed(s, f.plan, x, weight, rulebook, side, bias == Py_None ? NULL : bias, other);
  PyObject *steps = y ? hold(s, PyUnicode_Concat(f.steps, letters[1])) : NULL;
  if (!steps) return ended(s, NULL);
  /* Nothing is refused from here on. */
  PyObject *launched = Py_None;
  if (PyUnicode_GET_LENGTH(f.target) > f.at + 1) {
    PyObject *rest =
        hold(s, PyTuple_Pack(5, FIELD(epilogue, Epilogue, bias), Py_None, no_slope, norm, other));
    PyObject *end = rest ? hold(s, PyObject_CallMethodOneArg((PyObject *)Py_TYPE(epilogue),
                                                             s_Epilogue__make, rest))
                         : NULL;
    counted += changes(s, other);
    launched = y, y = s->state == GOES_ON ? deferred(s, f.call, end, steps, counted) : NULL;
    if (y && f.as_tensor) y = features_alone(s, y);
  }
  PUT(f.call, LayerCall, launched, launched);
  PUT(f.history, History, seen, steps), PUT(f.conv, DeferredConv, _used, two);
  return ended(s, y);
}

#include "training.c"

/* ---- the module ------------------------------------------------------------------------------ */

/* Where objects of a class have a slot. */
static Py_ssize_t place_of(PyObject *type, const char *name) {
  PyObject *found = PyObject_GetAttrString(type, name);
  Py_ssize_t at = -1;
  if (found && Py_IS_TYPE(found, &PyMemberDescr_Type)) {
    PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
    if (member->type == T_OBJECT_EX) at = member->offset;
  }
  if (at < 0) PyErr_Format(PyExc_TypeError, "%R has no slot %s", type, name);
  Py_XDECREF(found);
  return at;
}

/* configure({name: object}), see `HANDED` */
static PyObject *configure(PyObject *self, PyObject *handed) {
  if (!PyDict_CheckExact(handed)) return PyErr_Format(PyExc_TypeError, "expected a dict");
  configured = 0;
#define TAKE(name)                                                \
  {                                                               \
    PyObject *value = PyDict_GetItemString(handed, #name);        \
    if (!value) return PyErr_Format(PyExc_KeyError, "%s", #name); \
    Py_XSETREF(g_##name, Py_NewRef(value));                       \
  }
  HANDED(TAKE)
#undef TAKE
#define FIND(type, name) \
  if ((o_##type##_##name = place_of(g_##type, #name)) < 0) return NULL;
  SLOTS(FIND)
#undef FIND
  configured = 1;
  Py_RETURN_NONE;
}

/* refuse(share, seed): so many of all questions send a call Python's way, at random */
static PyObject *refuse(PyObject *self, PyObject *args) {
  double share;
  unsigned long long seed = 1;
  if (!PyArg_ParseTuple(args, "d|K", &share, &seed)) return NULL;
  refusing = (uint64_t)(share * 4294967296.0);
  drawn = 0x9e3779b97f4a7c15ull * (2 * seed + 1); /* never 0 */
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"configure", configure, METH_O, "Take what Python hands over."},
    {"refuse", refuse, METH_VARARGS, "Refuse this share of all calls, for tests."},
    {"known_call", (PyCFunction)(void (*)(void))known_call, METH_FASTCALL, "layers.known_call"},
    {"features_of", features_of, METH_O, "tensors.features_of"},
    {"normalised", (PyCFunction)(void (*)(void))normalised, METH_FASTCALL,
     "DeferredConv.as_launched behind a norm"},
    {"activated", (PyCFunction)(void (*)(void))activated, METH_FASTCALL,
     "DeferredConv.end_launched"},
    {"plus", (PyCFunction)(void (*)(void))plus, METH_FASTCALL, "DeferredConv.plus"},
    {"run_plain", (PyCFunction)(void (*)(void))run_plain, METH_FASTCALL, "plan.run"},
    {"gradients", (PyCFunction)(void (*)(void))gradients, METH_FASTCALL, "plan.backward"},
    {0}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "sparse_bridge_native", NULL, -1,
                                        methods};

PyMODINIT_FUNC PyInit_sparse_bridge_native(void) {
#define INTERN(name) \
  if (!(string_##name = PyUnicode_InternFromString(#name))) return NULL;
  STRINGS(INTERN)
#undef INTERN
  zero = PyLong_FromLong(0), one = PyLong_FromLong(1), two = PyLong_FromLong(2);
  no_slope = PyFloat_FromDouble(0.0);
  masked = PyUnicode_InternFromString("masked");
  unmasked = PyUnicode_InternFromString("unmasked");
  char steps[] = {STEP_NORM, STEP_SUM, STEP_ACTIVATION};
  for (int i = 0; i < 3; i++) letters[i] = PyUnicode_InternFromString((char[]){steps[i], 0});
  if (!zero || !one || !two || !no_slope || !masked || !unmasked || !letters[2]) return NULL;
  PyTypeObject *types[] = {&LauncherType, &BoundType, &KnownType};
  for (int i = 0; i < 3; i++)
    if (PyType_Ready(types[i]) < 0) return NULL;
  PyObject *module = PyModule_Create(&definition);
  if (!module || PyModule_AddObjectRef(module, "Launcher", (PyObject *)&LauncherType) < 0 ||
      PyModule_AddObjectRef(module, "Known", (PyObject *)&KnownType) < 0)
    return NULL;
  return module;
}
