/* Plays a network of sparse layers on a GPU: a file `model.sbp` of sparse_bridge, without Python.
 *
 * Needs the GPU's driver at run time (libcuda.so.1 or libamdhip64.so), which it opens itself; to
 * compile, a C99 compiler. Linux, 64 bits, little-endian.
 *
 *     sbrt_model *model; sbrt_instance *net; sbrt_error error;
 *     if (sbrt_load_file("model.sbp", &model, &error) || sbrt_create(model, 0, NULL, 0, &net, &error))
 *         return puts(error.text), 1;
 *     sbrt_run(net, SBRT_HOST, coords, features, n_rows, &error);
 *     sbrt_read(net, 0, memory, sizeof memory, &error);
 *     sbrt_destroy(net); sbrt_unload(model);
 *
 * Every call returns SBRT_OK (0) or another code, and then a sentence in `error`, which may be NULL.
 * An instance serves one thread at a time; instances serve threads side by side. A package holds
 * machine code: load those of people whom you trust.
 */
#ifndef SPARSE_BRIDGE_RT_H
#define SPARSE_BRIDGE_RT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SBRT_VERSION 2 /* of the file */
#define SBRT_MAX_DIMS 6

enum {
    SBRT_OK = 0,
    SBRT_ARGUMENT = 1,    /* a null pointer, or a number that is out of range */
    SBRT_FILE = 2,        /* the file cannot be read */
    SBRT_FORMAT = 3,      /* it is no package, was cut short, or has changed */
    SBRT_OTHER_VERSION = 4,
    SBRT_NO_DRIVER = 5,   /* neither driver can be opened */
    SBRT_NO_TARGET = 6,   /* the package holds nothing for this GPU */
    SBRT_MEMORY = 7,      /* of the host or of the GPU */
    SBRT_DRIVER = 8,      /* the driver refused a call, or the GPU is gone */
    SBRT_ROWS = 9,        /* more rows than the instance takes */
    SBRT_COORDINATES = 10, /* rows that are equal, or outside of the grid */
    SBRT_OVERFLOW = 11    /* a deeper level has more rows than there is memory for */
};

enum { SBRT_HOST = 0, SBRT_DEVICE = 1 }; /* where coordinates and features lie */

enum { SBRT_FLOAT16 = 1, SBRT_FLOAT32 = 2, SBRT_INT32 = 3, SBRT_INT64 = 4, SBRT_UINT8 = 5, SBRT_BFLOAT16 = 6 };

typedef struct sbrt_model sbrt_model;
typedef struct sbrt_instance sbrt_instance;

typedef struct {
    int code;
    char text[300];
} sbrt_error;

/* What goes in or comes out. dims: the first is the most rows that it may have where `level` is 0 or
 * more, and `rows` the rows of the last run; a dense tensor has level -1. data: on the GPU. */
typedef struct {
    const char *name;
    int dtype;
    int level;
    int n_dims;
    int64_t dims[SBRT_MAX_DIMS];
    int64_t rows;
    void *data;
} sbrt_tensor;

typedef struct {
    const char *target; /* "cuda:87", "hip:gfx942" */
    int64_t rows;       /* most rows of an input */
    int64_t memory;     /* bytes on the GPU at most, beside what the driver takes for any program */
    int64_t block;      /* those for tensors and weights, in one piece; the rest is for kernels */
    int n_steps, n_kernels, n_inputs, n_outputs;
} sbrt_program;

/* Read a package; both copy what they need. Nothing of it is trusted before it has been checked. */
int sbrt_load_file(const char *path, sbrt_model **model, sbrt_error *error);
int sbrt_load_memory(const void *data, size_t size, sbrt_model **model, sbrt_error *error);
/* After all instances of it. NULL is allowed. */
void sbrt_unload(sbrt_model *model);

/* What a package holds: one program for each target. */
int sbrt_info(const sbrt_model *model, int index, sbrt_program *program, sbrt_error *error);
int sbrt_count(const sbrt_model *model);

/* Take GPU number `device` for runs on `stream` (a CUstream or hipStream_t; NULL: one of its own).
 * rows: most rows of an input, 0 for what the package was made for. Takes all memory. */
int sbrt_create(const sbrt_model *model, int device, void *stream, int64_t rows, sbrt_instance **instance,
                sbrt_error *error);
/* The program of the package that an instance plays. */
int sbrt_playing(const sbrt_instance *instance, sbrt_program *program, sbrt_error *error);
/* NULL is allowed. */
void sbrt_destroy(sbrt_instance *instance);

/* Have later runs launch all steps as one graph, which costs the host less. Takes memory of the driver's. */
int sbrt_capture(sbrt_instance *instance, sbrt_error *error);

/* Run over n_rows rows. coords: int32 [n_rows, 1 + D], in the framework's order; features: [n_rows, C]; both lie on the
 * host or, there already or written on the instance's stream, on the device, as `where` says. Returns when
 * the results are there; takes no memory. */
int sbrt_run(sbrt_instance *instance, int where, const void *coords, const void *features, int64_t n_rows,
             sbrt_error *error);

/* The inputs and outputs of an instance. */
int sbrt_input(const sbrt_instance *instance, int index, sbrt_tensor *tensor, sbrt_error *error);
int sbrt_output(const sbrt_instance *instance, int index, sbrt_tensor *tensor, sbrt_error *error);
/* Copy the rows in use of an output of the last run to the host: `size` bytes or fewer. */
int sbrt_read(sbrt_instance *instance, int index, void *memory, size_t size, sbrt_error *error);

#ifdef __cplusplus
}
#endif
#endif
