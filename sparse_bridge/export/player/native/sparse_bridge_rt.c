/* The player of `model.sbp`; see sparse_bridge_rt.h. The format is in docs/deployment_gpu.md. */
#include "sparse_bridge_rt.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAGIC "\x89SBP\r\n\x1a\n"
#define HEADER (24 + 16 * N_SECTIONS)
#define MOST_BYTES ((uint64_t)1 << 46)
#define NAME_BYTES 128
#define CODE_PAGE ((uint64_t)4096)    /* a kernel's code begins at a multiple, or sooner */
#define GPU_PAGE ((uint64_t)2 << 20)  /* drivers take memory by these */
#define COUNTERS_MOST ((uint64_t)1 << 20) /* bytes from a level's counters to another one's */
#define ALLOWANCE ((uint64_t)2 << 20) /* for a stream, constants of kernels, and a graph */

enum { STRINGS, PROGRAMS, KERNELS, CODE, STEPS, ARGS, CONSTANTS, RELOCATIONS, TENSORS, LEVELS, EDGES, DATA, N_SECTIONS };
enum { CUDA = 1, HIP = 2 };
enum { LAUNCH = 0, FILL = 1, COPY = 2 };
enum { VALUE = 0, ADDRESS = 1 };

/* Records, as they lie in the file. */
typedef struct {
    uint32_t target, backend;
    uint64_t block, rows, count_at, flags_at;
    uint32_t kernels[2], steps[2], constants[2], relocations[2], inputs[2], outputs[2], levels[2], edges[2];
} program_record; /* pairs: the first one, and how many */

typedef struct {
    uint64_t code_at, code_size;
    uint32_t name, n_args, threads, shared;
} kernel_record;

typedef struct {
    uint32_t kind, kernel, grid[3], args[2], value; /* value, of FILL: 32 bits */
    uint64_t to, from, size;                        /* bytes */
} step_record;

typedef struct {
    uint32_t kind, size;
    uint64_t value;
} arg_record;

typedef struct {
    uint64_t at, data_at, size;
} constant_record;

typedef struct {
    uint64_t at, to;
} relocation_record;

typedef struct {
    uint32_t name, dtype;
    int32_t level;
    uint32_t n_dims;
    uint64_t dims[SBRT_MAX_DIMS], at, unused;
} tensor_record;

typedef struct {
    uint64_t counters_at, capacity;
    int32_t level, unused;
} level_record;

typedef struct {
    uint32_t from, to; /* steps: `to` waits for `from` in a graph */
} edge_record;

static const size_t RECORD[N_SECTIONS] = {
    1,
    sizeof(program_record),
    sizeof(kernel_record),
    1,
    sizeof(step_record),
    sizeof(arg_record),
    sizeof(constant_record),
    sizeof(relocation_record),
    sizeof(tensor_record),
    sizeof(level_record),
    sizeof(edge_record),
    1,
};

struct sbrt_model {
    unsigned char *bytes;
    uint64_t size;
    const unsigned char *section[N_SECTIONS];
    uint64_t count[N_SECTIONS];
};

/* ---- errors ---- */

static int fail(sbrt_error *error, int code, const char *format, ...)
{
    if (error != NULL) {
        va_list args;
        error->code = code;
        va_start(args, format);
        vsnprintf(error->text, sizeof error->text, format, args);
        va_end(args);
    }
    return code;
}

static int fine(sbrt_error *error)
{
    if (error != NULL) {
        error->code = SBRT_OK;
        error->text[0] = '\0';
    }
    return SBRT_OK;
}

/* ---- reading a package ---- */

/* CRC-32 as zlib's, eight bytes at a time. */
static uint32_t checksum(const unsigned char *bytes, uint64_t size)
{
    uint32_t table[8][256], crc = 0xffffffffu;
    int i, k;
    for (i = 0; i < 256; i++) {
        uint32_t value = (uint32_t)i;
        for (k = 0; k < 8; k++)
            value = (value >> 1) ^ (0xedb88320u & (0u - (value & 1u)));
        table[0][i] = value;
    }
    for (i = 0; i < 256; i++)
        for (k = 1; k < 8; k++)
            table[k][i] = (table[k - 1][i] >> 8) ^ table[0][table[k - 1][i] & 255];
    for (; size >= 8; size -= 8, bytes += 8) {
        uint32_t low, high;
        memcpy(&low, bytes, 4);
        memcpy(&high, bytes + 4, 4);
        low ^= crc;
        crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
              table[3][high & 255] ^ table[2][high >> 8 & 255] ^ table[1][high >> 16 & 255] ^ table[0][high >> 24];
    }
    for (; size > 0; size--, bytes++)
        crc = (crc >> 8) ^ table[0][(crc ^ *bytes) & 255];
    return ~crc;
}

static uint32_t u32_at(const unsigned char *bytes)
{
    uint32_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

static uint64_t u64_at(const unsigned char *bytes)
{
    uint64_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

/* Record `index` of a section. Sections begin at multiples of eight bytes. */
static const void *record(const sbrt_model *model, int section, uint64_t index)
{
    return model->section[section] + index * RECORD[section];
}

#define PROGRAM(model, i) ((const program_record *)record(model, PROGRAMS, i))
#define KERNEL(model, i) ((const kernel_record *)record(model, KERNELS, i))
#define STEP(model, i) ((const step_record *)record(model, STEPS, i))
#define ARG(model, i) ((const arg_record *)record(model, ARGS, i))
#define CONSTANT(model, i) ((const constant_record *)record(model, CONSTANTS, i))
#define RELOCATION(model, i) ((const relocation_record *)record(model, RELOCATIONS, i))
#define TENSOR(model, i) ((const tensor_record *)record(model, TENSORS, i))
#define LEVEL(model, i) ((const level_record *)record(model, LEVELS, i))
#define EDGE(model, i) ((const edge_record *)record(model, EDGES, i))

/* Whether `size` bytes from `at` on lie within `whole` bytes. */
static int within(uint64_t at, uint64_t size, uint64_t whole)
{
    return at <= whole && size <= whole - at;
}

static int lies_in(const sbrt_model *model, const uint32_t part[2], int section)
{
    return within(part[0], part[1], model->count[section]);
}

/* A name of at most NAME_BYTES - 1 bytes; NULL where there is none. */
static const char *text(const sbrt_model *model, uint32_t at)
{
    uint64_t left, i;
    if (at >= model->count[STRINGS])
        return NULL;
    left = model->count[STRINGS] - at;
    for (i = 0; i < left && i < NAME_BYTES; i++)
        if (model->section[STRINGS][at + i] == '\0')
            return (const char *)model->section[STRINGS] + at;
    return NULL;
}

static uint64_t bytes_of(uint32_t dtype)
{
    switch (dtype) {
    case SBRT_FLOAT16:
    case SBRT_BFLOAT16:
        return 2;
    case SBRT_FLOAT32:
    case SBRT_INT32:
        return 4;
    case SBRT_INT64:
        return 8;
    case SBRT_UINT8:
        return 1;
    default:
        return 0;
    }
}

/* Bytes of one row of a tensor (of all of it: whole); 0 where the numbers are absurd. */
static uint64_t tensor_bytes(const tensor_record *tensor, int whole)
{
    uint64_t size = bytes_of(tensor->dtype);
    uint32_t i;
    if (tensor->n_dims < 1 || tensor->n_dims > SBRT_MAX_DIMS)
        return 0;
    for (i = whole ? 0 : 1; i < tensor->n_dims; i++) {
        if (tensor->dims[i] == 0 || tensor->dims[i] > MOST_BYTES || size > MOST_BYTES / tensor->dims[i])
            return 0;
        size *= tensor->dims[i];
    }
    return size;
}

#define REQUIRE(condition, what)                                                                                       \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return fail(error, SBRT_FORMAT, "The package is damaged: %s. Write it again.", what);                       \
    } while (0)

static int check_kernels(const sbrt_model *model, const program_record *program, sbrt_error *error)
{
    uint64_t code = 0;
    uint32_t i;
    for (i = 0; i < program->kernels[1]; i++) {
        const kernel_record *kernel = KERNEL(model, program->kernels[0] + i);
        REQUIRE(text(model, kernel->name) != NULL, "a kernel has no name");
        REQUIRE(kernel->code_size > 0 && within(kernel->code_at, kernel->code_size, model->count[CODE]),
                "a kernel's code lies outside of the file");
        REQUIRE(kernel->code_at % 8 == 0, "a kernel's code is not aligned");
        REQUIRE((code += kernel->code_size) <= MOST_BYTES, "the kernels have absurd sizes");
        REQUIRE(kernel->threads >= 1 && kernel->threads <= 1024, "a kernel has an absurd number of threads");
        REQUIRE(kernel->shared <= 1u << 20, "a kernel has an absurd size of shared memory");
    }
    return SBRT_OK;
}

static int check_launch(const sbrt_model *model, const program_record *program, const step_record *step,
                        sbrt_error *error)
{
    uint32_t i;
    REQUIRE(step->kernel < program->kernels[1], "a step launches a kernel that is not there");
    REQUIRE(lies_in(model, step->args, ARGS), "arguments of a launch lie outside of the file");
    REQUIRE(step->args[1] == KERNEL(model, program->kernels[0] + step->kernel)->n_args,
            "a launch has another number of arguments than its kernel");
    REQUIRE(step->grid[0] >= 1 && step->grid[0] <= 0x7fffffffu && step->grid[1] >= 1 && step->grid[1] <= 65535 &&
                step->grid[2] >= 1 && step->grid[2] <= 65535,
            "a launch has an absurd grid");
    for (i = 0; i < step->args[1]; i++) {
        const arg_record *arg = ARG(model, step->args[0] + i);
        REQUIRE(arg->kind <= ADDRESS, "an argument is of no known kind");
        REQUIRE(arg->size == 1 || arg->size == 2 || arg->size == 4 || arg->size == 8, "an argument has an absurd size");
        REQUIRE(arg->kind != ADDRESS || (arg->size == 8 && arg->value < program->block),
                "an argument points outside of the memory");
    }
    return SBRT_OK;
}

static int check_steps(const sbrt_model *model, const program_record *program, sbrt_error *error)
{
    uint32_t i;
    for (i = 0; i < program->steps[1]; i++) {
        const step_record *step = STEP(model, program->steps[0] + i);
        REQUIRE(step->kind <= COPY, "a step is of no known kind");
        if (step->kind == LAUNCH) {
            int code = check_launch(model, program, step, error);
            if (code)
                return code;
            continue;
        }
        REQUIRE(step->size > 0 && within(step->to, step->size, program->block), "a step writes outside of the memory");
        REQUIRE(step->kind != FILL || (step->to % 4 == 0 && step->size % 4 == 0), "a fill is not aligned");
        REQUIRE(step->kind != COPY || within(step->from, step->size, program->block),
                "a step reads outside of the memory");
    }
    for (i = 0; i < program->edges[1]; i++) {
        const edge_record *edge = EDGE(model, program->edges[0] + i);
        REQUIRE(edge->from < edge->to && edge->to < program->steps[1], "a step waits for one that is not before it");
        REQUIRE(i == 0 || edge[-1].to < edge->to || (edge[-1].to == edge->to && edge[-1].from > edge->from),
                "what steps wait for is out of order");
    }
    return SBRT_OK;
}

/* Where the counters of all levels lie in the block: from *begin on so many bytes, which one copy brings. */
static uint64_t level_counters(const sbrt_model *model, const program_record *program, uint64_t *begin)
{
    uint64_t end = 0;
    uint32_t i;
    *begin = program->block;
    for (i = 0; i < program->levels[1]; i++) {
        uint64_t at = LEVEL(model, program->levels[0] + i)->counters_at;
        *begin = at < *begin ? at : *begin;
        end = at + 16 > end ? at + 16 : end;
    }
    return program->levels[1] > 0 ? end - *begin : 0;
}

static int check_memory(const sbrt_model *model, const program_record *program, sbrt_error *error)
{
    uint64_t begin;
    uint32_t i;
    for (i = 0; i < program->constants[1]; i++) {
        const constant_record *constant = CONSTANT(model, program->constants[0] + i);
        REQUIRE(within(constant->at, constant->size, program->block), "weights lie outside of the memory");
        REQUIRE(within(constant->data_at, constant->size, model->count[DATA]), "weights lie outside of the file");
    }
    for (i = 0; i < program->relocations[1]; i++) {
        const relocation_record *relocation = RELOCATION(model, program->relocations[0] + i);
        REQUIRE(relocation->at % 8 == 0 && within(relocation->at, 8, program->block),
                "an address lies outside of the memory");
        REQUIRE(relocation->to < program->block, "an address leads outside of the memory");
    }
    for (i = 0; i < program->levels[1]; i++) {
        const level_record *level = LEVEL(model, program->levels[0] + i);
        REQUIRE(level->counters_at % 4 == 0 && within(level->counters_at, 16, program->block),
                "counters lie outside of the memory");
        REQUIRE(level->level >= 1 && level->capacity >= 1 && level->capacity < (uint64_t)1 << 31,
                "a level has an absurd number of rows");
    }
    REQUIRE(program->count_at % 4 == 0 && within(program->count_at, 4, program->block),
            "the number of rows lies outside of the memory");
    REQUIRE(program->flags_at % 4 == 0 && within(program->flags_at, 16, program->block),
            "counters lie outside of the memory");
    REQUIRE(level_counters(model, program, &begin) <= COUNTERS_MOST, "counters of levels lie apart");
    return SBRT_OK;
}

/* Rows of a level at most; 0 where it is none of the program's. */
static uint64_t level_rows(const sbrt_model *model, const program_record *program, int32_t level)
{
    uint32_t i;
    if (level == 0)
        return program->rows;
    for (i = 0; i < program->levels[1]; i++)
        if (LEVEL(model, program->levels[0] + i)->level == level)
            return LEVEL(model, program->levels[0] + i)->capacity;
    return 0;
}

static int check_tensors(const sbrt_model *model, const program_record *program, const uint32_t part[2],
                         sbrt_error *error)
{
    uint32_t i;
    for (i = 0; i < part[1]; i++) {
        const tensor_record *tensor = TENSOR(model, part[0] + i);
        uint64_t size = tensor_bytes(tensor, 1);
        REQUIRE(text(model, tensor->name) != NULL, "a tensor has no name");
        REQUIRE(size > 0, "a tensor has an absurd shape or dtype");
        REQUIRE(within(tensor->at, size, program->block), "a tensor lies outside of the memory");
        REQUIRE(tensor->level >= -1, "a tensor belongs to no level");
        REQUIRE(tensor->level < 0 || tensor->dims[0] == level_rows(model, program, tensor->level),
                "a tensor has other rows than its level");
    }
    return SBRT_OK;
}

static int check_program(const sbrt_model *model, const program_record *program, sbrt_error *error)
{
    const tensor_record *coords, *features;
    int code;
    REQUIRE(text(model, program->target) != NULL, "a program has no target");
    REQUIRE(program->backend == CUDA || program->backend == HIP, "a program is for no known driver");
    REQUIRE(program->block >= 1 && program->block <= MOST_BYTES, "a program has an absurd size of memory");
    REQUIRE(program->rows >= 1 && program->rows < (uint64_t)1 << 31, "a program has an absurd number of rows");
    REQUIRE(lies_in(model, program->kernels, KERNELS) && lies_in(model, program->steps, STEPS) &&
                lies_in(model, program->constants, CONSTANTS) && lies_in(model, program->relocations, RELOCATIONS) &&
                lies_in(model, program->inputs, TENSORS) && lies_in(model, program->outputs, TENSORS) &&
                lies_in(model, program->levels, LEVELS) && lies_in(model, program->edges, EDGES),
            "a program lies outside of the file");
    if ((code = check_kernels(model, program, error)) || (code = check_steps(model, program, error)) ||
        (code = check_memory(model, program, error)) || (code = check_tensors(model, program, program->inputs, error)) ||
        (code = check_tensors(model, program, program->outputs, error)))
        return code;
    REQUIRE(program->inputs[1] == 2 && program->outputs[1] >= 1, "a program has other inputs or no outputs");
    coords = TENSOR(model, program->inputs[0]);
    features = TENSOR(model, program->inputs[0] + 1);
    REQUIRE(coords->level == 0 && coords->dtype == SBRT_INT32 && coords->n_dims == 2, "the coordinates are none");
    REQUIRE(features->level == 0 && features->n_dims == 2, "the features are none");
    REQUIRE(coords->at % 4 == 0 && features->at % 4 == 0 &&
                within(features->at, (tensor_bytes(features, 1) + 3) / 4 * 4, program->block),
            "an input is not aligned");
    return SBRT_OK;
}

static int check_model(sbrt_model *model, sbrt_error *error)
{
    const unsigned char *bytes = model->bytes;
    uint64_t i;
    int section;
    if (model->size < HEADER || memcmp(bytes, MAGIC, 8) != 0)
        return fail(error, SBRT_FORMAT, "This is no package of sparse_bridge: expected a file `model.sbp`.");
    if (u32_at(bytes + 8) != SBRT_VERSION)
        return fail(error, SBRT_OTHER_VERSION,
                    "The package has version %lu of its format; this player reads version %d. Take the player that "
                    "was written beside the package.",
                    (unsigned long)u32_at(bytes + 8), SBRT_VERSION);
    if (u64_at(bytes + 16) != model->size)
        return fail(error, SBRT_FORMAT, "The package has %llu bytes; it was written with %llu. Copy it again.",
                    (unsigned long long)model->size, (unsigned long long)u64_at(bytes + 16));
    if (checksum(bytes + 16, model->size - 16) != u32_at(bytes + 12))
        return fail(error, SBRT_FORMAT,
                    "The package has changed since it was written: its checksum differs. Copy it again.");
    for (section = 0; section < N_SECTIONS; section++) {
        uint64_t at = u64_at(bytes + 24 + 16 * section), count = u64_at(bytes + 32 + 16 * section);
        REQUIRE(at % 8 == 0 && at >= HEADER && at <= model->size && count <= (model->size - at) / RECORD[section],
                "a part lies outside of the file");
        model->section[section] = bytes + at;
        model->count[section] = count;
    }
    REQUIRE(model->count[PROGRAMS] >= 1 && model->count[PROGRAMS] <= 1024, "it holds no program");
    for (i = 0; i < model->count[PROGRAMS]; i++) {
        int code = check_program(model, PROGRAM(model, i), error);
        if (code)
            return code;
    }
    return SBRT_OK;
}

/* Take over `bytes`, of malloc. */
static int load(unsigned char *bytes, uint64_t size, sbrt_model **result, sbrt_error *error)
{
    const uint32_t one = 1;
    sbrt_model *model = calloc(1, sizeof *model);
    int code;
    if (model == NULL) {
        free(bytes);
        return fail(error, SBRT_MEMORY, "The host has no memory left.");
    }
    model->bytes = bytes;
    model->size = size;
    if (*(const unsigned char *)&one != 1 || sizeof(void *) != 8)
        code = fail(error, SBRT_FORMAT, "Packages are for little-endian machines of 64 bits.");
    else
        code = check_model(model, error);
    if (code) {
        sbrt_unload(model);
        return code;
    }
    *result = model;
    return fine(error);
}

int sbrt_load_memory(const void *data, size_t size, sbrt_model **model, sbrt_error *error)
{
    unsigned char *bytes;
    if (model == NULL || data == NULL)
        return fail(error, SBRT_ARGUMENT, "sbrt_load_memory got a null pointer.");
    *model = NULL;
    bytes = malloc(size > 0 ? size : 1);
    if (bytes == NULL)
        return fail(error, SBRT_MEMORY, "The host has no %llu bytes for the package.", (unsigned long long)size);
    memcpy(bytes, data, size);
    return load(bytes, size, model, error);
}

int sbrt_load_file(const char *path, sbrt_model **model, sbrt_error *error)
{
    FILE *file;
    unsigned char *bytes = NULL;
    long size;
    if (model == NULL || path == NULL)
        return fail(error, SBRT_ARGUMENT, "sbrt_load_file got a null pointer.");
    *model = NULL;
    file = fopen(path, "rb");
    if (file == NULL)
        return fail(error, SBRT_FILE, "%.200s cannot be opened.", path);
    if (fseek(file, 0, SEEK_END) != 0 || (size = ftell(file)) < 0 || size > (long)(MOST_BYTES >> 1) ||
        fseek(file, 0, SEEK_SET) != 0) {
        fclose(file);
        return fail(error, SBRT_FILE, "%.200s cannot be read: it is no plain file.", path);
    }
    bytes = malloc(size > 0 ? (size_t)size : 1);
    if (bytes == NULL || fread(bytes, 1, (size_t)size, file) != (size_t)size) {
        int code = bytes == NULL ? SBRT_MEMORY : SBRT_FILE;
        free(bytes);
        fclose(file);
        return fail(error, code, "%.200s cannot be read.", path);
    }
    fclose(file);
    return load(bytes, (uint64_t)size, model, error);
}

void sbrt_unload(sbrt_model *model)
{
    if (model != NULL) {
        free(model->bytes);
        free(model);
    }
}

int sbrt_count(const sbrt_model *model)
{
    return model == NULL ? 0 : (int)model->count[PROGRAMS];
}

static uint64_t rounded_up(uint64_t size, uint64_t to)
{
    return (size + to - 1) / to * to;
}

/* Bytes that a program takes on the GPU, at most; `needed` of memory_plan.py is its twin. */
static uint64_t needed(const sbrt_model *model, const program_record *program)
{
    uint64_t code = 0;
    uint32_t i;
    for (i = 0; i < program->kernels[1]; i++)
        code += rounded_up(KERNEL(model, program->kernels[0] + i)->code_size, CODE_PAGE);
    return rounded_up(program->block, GPU_PAGE) + rounded_up(code, GPU_PAGE) + ALLOWANCE;
}

static void describe_program(const sbrt_model *model, const program_record *own, sbrt_program *program)
{
    program->target = text(model, own->target);
    program->rows = (int64_t)own->rows;
    program->memory = (int64_t)needed(model, own);
    program->block = (int64_t)own->block;
    program->n_steps = (int)own->steps[1];
    program->n_kernels = (int)own->kernels[1];
    program->n_inputs = (int)own->inputs[1];
    program->n_outputs = (int)own->outputs[1];
}

int sbrt_info(const sbrt_model *model, int index, sbrt_program *program, sbrt_error *error)
{
    if (model == NULL || program == NULL)
        return fail(error, SBRT_ARGUMENT, "sbrt_info got a null pointer.");
    if (index < 0 || index >= sbrt_count(model))
        return fail(error, SBRT_ARGUMENT, "program %d; the package holds %d, from 0 on.", index, sbrt_count(model));
    describe_program(model, PROGRAM(model, index), program);
    return fine(error);
}

/* ---- drivers: both have the same calls under other names ---- */

typedef struct {
    int backend;
    int (*init)(unsigned);
    int (*get_count)(int *);
    int (*set_device)(int);                                  /* HIP */
    int (*get_device)(int *, int);                           /* CUDA, as the next five */
    int (*get_attribute)(int *, int, int);
    int (*retain)(void **, int);
    int (*release)(int);
    int (*push)(void *);
    int (*pop)(void **);
    int (*set_function)(void *, int, int);
    int (*load_module)(void **, const void *);
    int (*unload_module)(void *);
    int (*get_function)(void **, void *, const char *);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                  void **);
    int (*take)(void **, size_t);
    int (*give)(void *);
    int (*take_host)(void **, size_t, unsigned);
    int (*give_host)(void *);
    int (*to_device)(void *, const void *, size_t, void *);
    int (*to_host)(void *, void *, size_t, void *);
    int (*between)(void *, void *, size_t, void *);
    int (*fill)(void *, unsigned, size_t, void *);
    int (*make_stream)(void **, unsigned);
    int (*end_stream)(void *);
    int (*wait)(void *);
    int (*begin_capture)(void *, int);
    int (*end_capture)(void *, void **);
    int (*get_captured)(void *, int *, unsigned long long *, void **, void *const **, size_t *); /* NULL: an old driver */
    int (*wait_for)(void *, void **, size_t, unsigned);                                          /* the same */
    int (*make_graph)(void **, void *, unsigned long long);
    int (*launch_graph)(void *, void *);
    int (*drop_made)(void *);
    int (*drop_captured)(void *);
    int (*cuda_text)(int, const char **);
    const char *(*hip_text)(int);
} driver;

typedef struct {
    size_t at;
    const char *cuda, *hip;
} symbol;

#define AT(member) offsetof(driver, member)
static const symbol SYMBOLS[] = {
    {AT(init), "cuInit", "hipInit"},
    {AT(get_count), "cuDeviceGetCount", "hipGetDeviceCount"},
    {AT(set_device), NULL, "hipSetDevice"},
    {AT(get_device), "cuDeviceGet", NULL},
    {AT(get_attribute), "cuDeviceGetAttribute", NULL},
    {AT(retain), "cuDevicePrimaryCtxRetain", NULL},
    {AT(release), "cuDevicePrimaryCtxRelease_v2", NULL},
    {AT(push), "cuCtxPushCurrent_v2", NULL},
    {AT(pop), "cuCtxPopCurrent_v2", NULL},
    {AT(set_function), "cuFuncSetAttribute", NULL},
    {AT(load_module), "cuModuleLoadData", "hipModuleLoadData"},
    {AT(unload_module), "cuModuleUnload", "hipModuleUnload"},
    {AT(get_function), "cuModuleGetFunction", "hipModuleGetFunction"},
    {AT(launch), "cuLaunchKernel", "hipModuleLaunchKernel"},
    {AT(take), "cuMemAlloc_v2", "hipMalloc"},
    {AT(give), "cuMemFree_v2", "hipFree"},
    {AT(take_host), "cuMemHostAlloc", "hipHostMalloc"},
    {AT(give_host), "cuMemFreeHost", "hipHostFree"},
    {AT(to_device), "cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync"},
    {AT(to_host), "cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync"},
    {AT(between), "cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync"},
    {AT(fill), "cuMemsetD32Async", "hipMemsetD32Async"},
    {AT(make_stream), "cuStreamCreate", "hipStreamCreateWithFlags"},
    {AT(end_stream), "cuStreamDestroy_v2", "hipStreamDestroy"},
    {AT(wait), "cuStreamSynchronize", "hipStreamSynchronize"},
    {AT(begin_capture), "cuStreamBeginCapture_v2", "hipStreamBeginCapture"},
    {AT(end_capture), "cuStreamEndCapture", "hipStreamEndCapture"},
    {AT(get_captured), "cuStreamGetCaptureInfo_v2", "hipStreamGetCaptureInfo_v2"},
    {AT(wait_for), "cuStreamUpdateCaptureDependencies", "hipStreamUpdateCaptureDependencies"},
    {AT(make_graph), "cuGraphInstantiateWithFlags", "hipGraphInstantiateWithFlags"},
    {AT(launch_graph), "cuGraphLaunch", "hipGraphLaunch"},
    {AT(drop_made), "cuGraphExecDestroy", "hipGraphExecDestroy"},
    {AT(drop_captured), "cuGraphDestroy", "hipGraphDestroy"},
    {AT(cuda_text), "cuGetErrorString", NULL},
    {AT(hip_text), NULL, "hipGetErrorString"},
};

/* Open a driver, which stays open: NULL, or what is missing. */
static const char *open_driver(driver *result, int backend)
{
    static const char *const CUDA_NAMES[] = {"libcuda.so.1", "libcuda.so", NULL};
    static const char *const HIP_NAMES[] = {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", NULL};
    const char *const *names = backend == CUDA ? CUDA_NAMES : HIP_NAMES;
    void *library = NULL;
    size_t i;
    for (i = 0; library == NULL && names[i] != NULL; i++)
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return names[0];
    memset(result, 0, sizeof *result);
    result->backend = backend;
    for (i = 0; i < sizeof SYMBOLS / sizeof *SYMBOLS; i++) {
        const char *name = backend == CUDA ? SYMBOLS[i].cuda : SYMBOLS[i].hip;
        void *address;
        if (name == NULL)
            continue;
        address = dlsym(library, name);
        if (address == NULL && SYMBOLS[i].at != AT(get_captured) && SYMBOLS[i].at != AT(wait_for))
            return name;
        memcpy((char *)result + SYMBOLS[i].at, &address, sizeof address);
    }
    return NULL;
}

/* ---- instances ---- */

typedef struct {
    void *function;
    void **parameters;
} launch;

struct sbrt_instance {
    const sbrt_model *model;
    const program_record *program;
    driver driver;
    int device;
    void *context; /* CUDA's */
    void *stream;
    int own_stream, retained;
    unsigned char *memory; /* on the GPU */
    void **modules;        /* of kernels */
    launch *launches;      /* by step */
    void **parameters;     /* of all launches: addresses of values */
    uint64_t *values;
    uint64_t *addresses; /* of relocations, as they were sent */
    void *graph; /* all steps; NULL: they are launched one by one */
    unsigned char *host; /* pinned: counters of the last run, four of the input, then those of levels as in the block */
    uint64_t counters, counters_size; /* of levels, in the block */
    int64_t limit; /* of rows */
    int64_t rows;  /* of the last run; -1: there is none that succeeded */
};

static int refused(const sbrt_instance *it, int code, const char *call, sbrt_error *error)
{
    const char *words = NULL;
    if (it->driver.backend == CUDA)
        it->driver.cuda_text(code, &words);
    else
        words = it->driver.hip_text(code);
    /* 2: out of memory, of both. */
    return fail(error, code == 2 ? SBRT_MEMORY : SBRT_DRIVER, "The driver failed to %s: %.180s (%d).", call,
                words == NULL ? "unknown error" : words, code);
}

#define DRIVE(expression, call)                                                                                        \
    do {                                                                                                               \
        int status_ = (expression);                                                                                    \
        if (status_)                                                                                                   \
            return refused(it, status_, call, error);                                                                  \
    } while (0)

/* Have this thread talk to the GPU; `leave` puts CUDA's context back. */
static int enter(const sbrt_instance *it, sbrt_error *error)
{
    if (it->driver.backend == CUDA)
        DRIVE(it->driver.push(it->context), "take the GPU");
    else
        DRIVE(it->driver.set_device(it->device), "take the GPU");
    return SBRT_OK;
}

static void leave(const sbrt_instance *it)
{
    void *context;
    if (it->driver.backend == CUDA)
        it->driver.pop(&context);
}

static int begin_device(sbrt_instance *it, sbrt_error *error)
{
    int count = 0, handle = 0;
    DRIVE(it->driver.init(0), "start");
    DRIVE(it->driver.get_count(&count), "count GPUs");
    if (it->device < 0 || it->device >= count)
        return fail(error, SBRT_ARGUMENT, "GPU number %d; there are %d, from 0 on.", it->device, count);
    if (it->driver.backend == CUDA) {
        DRIVE(it->driver.get_device(&handle, it->device), "find the GPU");
        DRIVE(it->driver.retain(&it->context, handle), "take the GPU");
        it->device = handle;
        it->retained = 1;
    }
    return SBRT_OK;
}

/* Whether the code of a program is for this GPU: NVIDIA's say which they are; of AMD's whether the
 * first kernel loads. */
static int serves(sbrt_instance *it, const program_record *program)
{
    char name[32];
    void *module = NULL;
    int major = 0, minor = 0;
    if (it->driver.backend == HIP) {
        const kernel_record *first = KERNEL(it->model, program->kernels[0]);
        if (program->kernels[1] == 0 || it->driver.load_module(&module, it->model->section[CODE] + first->code_at))
            return 0;
        it->driver.unload_module(module);
        return 1;
    }
    if (it->driver.get_attribute(&major, 75, it->device) || it->driver.get_attribute(&minor, 76, it->device))
        return 0;
    snprintf(name, sizeof name, "cuda:%d%d", major, minor);
    return strcmp(name, text(it->model, program->target)) == 0;
}

static int load_kernels(sbrt_instance *it, sbrt_error *error)
{
    const program_record *program = it->program;
    uint32_t i, n = program->kernels[1], n_steps = program->steps[1];
    uint64_t n_args = 0;
    void **functions;
    for (i = 0; i < n_steps; i++)
        if (STEP(it->model, program->steps[0] + i)->kind == LAUNCH)
            n_args += STEP(it->model, program->steps[0] + i)->args[1];
    it->modules = calloc((size_t)n + 1, sizeof *it->modules);
    it->launches = calloc((size_t)n_steps + 1, sizeof *it->launches);
    it->parameters = calloc((size_t)n_args + 1, sizeof *it->parameters);
    it->values = calloc((size_t)n_args + 1, sizeof *it->values);
    functions = calloc((size_t)n + 1, sizeof *functions);
    if (!it->modules || !it->launches || !it->parameters || !it->values || !functions) {
        free(functions);
        return fail(error, SBRT_MEMORY, "The host has no memory left.");
    }
    for (i = 0; i < n; i++) {
        const kernel_record *kernel = KERNEL(it->model, program->kernels[0] + i);
        int code = it->driver.load_module(&it->modules[i], it->model->section[CODE] + kernel->code_at);
        if (!code)
            code = it->driver.get_function(&functions[i], it->modules[i], text(it->model, kernel->name));
        if (!code && it->driver.backend == CUDA && kernel->shared > 48u << 10)
            code = it->driver.set_function(functions[i], 8, (int)kernel->shared); /* dynamic shared memory */
        if (code) {
            free(functions);
            return refused(it, code, "load a kernel", error);
        }
    }
    for (i = 0, n_args = 0; i < n_steps; i++) {
        const step_record *step = STEP(it->model, program->steps[0] + i);
        uint32_t k;
        if (step->kind != LAUNCH)
            continue;
        it->launches[i].function = functions[step->kernel];
        it->launches[i].parameters = it->parameters + n_args;
        for (k = 0; k < step->args[1]; k++, n_args++) {
            const arg_record *arg = ARG(it->model, step->args[0] + k);
            it->values[n_args] = arg->value + (arg->kind == ADDRESS ? (uint64_t)(uintptr_t)it->memory : 0);
            it->parameters[n_args] = &it->values[n_args];
        }
    }
    free(functions);
    return SBRT_OK;
}

/* Weights, addresses among them, and zeros for the inputs, whose rows may be fewer. */
static int fill_memory(sbrt_instance *it, sbrt_error *error)
{
    const program_record *program = it->program;
    uint32_t i;
    it->addresses = calloc((size_t)program->relocations[1] + 1, sizeof *it->addresses);
    if (it->addresses == NULL)
        return fail(error, SBRT_MEMORY, "The host has no memory left.");
    for (i = 0; i < program->inputs[1]; i++) {
        const tensor_record *input = TENSOR(it->model, program->inputs[0] + i);
        DRIVE(it->driver.fill(it->memory + input->at, 0, (size_t)((tensor_bytes(input, 1) + 3) / 4),
                              it->stream),
              "clear the inputs");
    }
    for (i = 0; i < program->constants[1]; i++) {
        const constant_record *constant = CONSTANT(it->model, program->constants[0] + i);
        if (constant->size > 0)
            DRIVE(it->driver.to_device(it->memory + constant->at, it->model->section[DATA] + constant->data_at,
                                       (size_t)constant->size, it->stream),
                  "copy weights");
    }
    for (i = 0; i < program->relocations[1]; i++) {
        const relocation_record *relocation = RELOCATION(it->model, program->relocations[0] + i);
        it->addresses[i] = (uint64_t)(uintptr_t)it->memory + relocation->to;
        DRIVE(it->driver.to_device(it->memory + relocation->at, &it->addresses[i], sizeof *it->addresses, it->stream),
              "copy addresses");
    }
    DRIVE(it->driver.wait(it->stream), "copy weights");
    return SBRT_OK;
}

static int take_memory(sbrt_instance *it, sbrt_error *error)
{
    void *memory = NULL, *host = NULL;
    it->counters_size = level_counters(it->model, it->program, &it->counters);
    if (it->stream == NULL) {
        DRIVE(it->driver.make_stream(&it->stream, 1), "make a stream"); /* 1: beside the default stream */
        it->own_stream = 1;
    }
    if (it->driver.take(&memory, (size_t)it->program->block))
        return fail(error, SBRT_MEMORY,
                    "The GPU has no %llu bytes left, which this package takes in one block. Package the network with "
                    "fewer --rows.",
                    (unsigned long long)it->program->block);
    it->memory = memory;
    DRIVE(it->driver.take_host(&host, (size_t)it->counters_size + 16, 0), "take pinned memory");
    it->host = host;
    return SBRT_OK;
}

static int build(sbrt_instance *it, sbrt_error *error)
{
    int code = enter(it, error);
    if (code)
        return code;
    if (!(code = take_memory(it, error)) && !(code = load_kernels(it, error)))
        code = fill_memory(it, error);
    leave(it);
    return code;
}

/* The program for GPU `device` under one driver; NULL, with the reason, where there is none. */
static int find_program(sbrt_instance *it, int backend, int *searched, sbrt_error *error)
{
    uint64_t i;
    int code, present = 0;
    const char *missing;
    for (i = 0; i < it->model->count[PROGRAMS]; i++)
        present |= (int)PROGRAM(it->model, i)->backend == backend;
    if (!present)
        return SBRT_OK;
    missing = open_driver(&it->driver, backend);
    if (missing != NULL)
        return fail(error, SBRT_NO_DRIVER, "%s is missing: install the GPU's driver.", missing);
    if ((code = begin_device(it, error)) || (code = enter(it, error)))
        return code;
    *searched = 1;
    for (i = 0; i < it->model->count[PROGRAMS] && it->program == NULL; i++)
        if ((int)PROGRAM(it->model, i)->backend == backend && serves(it, PROGRAM(it->model, i)))
            it->program = PROGRAM(it->model, i);
    leave(it);
    return SBRT_OK;
}

static int choose(sbrt_instance *it, sbrt_error *error)
{
    char targets[160] = "";
    sbrt_error own, said = {SBRT_OK, ""};
    uint64_t i;
    size_t used = 0;
    int searched = 0, code, first = SBRT_OK, device = it->device;
    for (i = CUDA; i <= HIP && it->program == NULL; i++) {
        if (it->retained) {
            it->driver.release(it->device);
            it->retained = 0;
        }
        it->device = device;
        /* A driver that is there says more than one that is not. */
        code = find_program(it, (int)i, &searched, &own);
        if (code && (!first || (first == SBRT_NO_DRIVER && code != SBRT_NO_DRIVER))) {
            first = code;
            said = own;
        }
    }
    if (it->program != NULL)
        return SBRT_OK;
    if (first && !searched)
        return fail(error, first, "%s", said.text);
    for (i = 0; i < it->model->count[PROGRAMS] && used < sizeof targets; i++)
        used += (size_t)snprintf(targets + used, sizeof targets - used, "%s%s", i ? ", " : "",
                                 text(it->model, PROGRAM(it->model, i)->target));
    return fail(error, SBRT_NO_TARGET, "The package holds nothing for this GPU, only for %s. Package with its --target.",
                targets);
}

int sbrt_create(const sbrt_model *model, int device, void *stream, int64_t rows, sbrt_instance **instance,
                sbrt_error *error)
{
    sbrt_instance *it;
    int code;
    if (model == NULL || instance == NULL)
        return fail(error, SBRT_ARGUMENT, "sbrt_create got a null pointer.");
    *instance = NULL;
    it = calloc(1, sizeof *it);
    if (it == NULL)
        return fail(error, SBRT_MEMORY, "The host has no memory left.");
    it->model = model;
    it->device = device;
    it->stream = stream;
    it->rows = -1;
    code = choose(it, error);
    if (!code) {
        it->limit = rows ? rows : (int64_t)it->program->rows;
        if (it->limit < 0 || (uint64_t)it->limit > it->program->rows)
            code = fail(error, SBRT_ROWS, "%lld rows; the package was made for %llu. Package with more --rows.",
                        (long long)rows, (unsigned long long)it->program->rows);
        else
            code = build(it, error);
    }
    if (code) {
        sbrt_destroy(it);
        return code;
    }
    *instance = it;
    return fine(error);
}

void sbrt_destroy(sbrt_instance *it)
{
    uint32_t i;
    if (it == NULL)
        return;
    if (it->program != NULL && enter(it, NULL) == SBRT_OK) {
        if (it->stream != NULL)
            it->driver.wait(it->stream);
        for (i = 0; it->modules != NULL && i < it->program->kernels[1]; i++)
            if (it->modules[i] != NULL)
                it->driver.unload_module(it->modules[i]);
        if (it->graph != NULL)
            it->driver.drop_made(it->graph);
        if (it->memory != NULL)
            it->driver.give(it->memory);
        if (it->host != NULL)
            it->driver.give_host(it->host);
        if (it->own_stream)
            it->driver.end_stream(it->stream);
        leave(it);
    }
    if (it->retained)
        it->driver.release(it->device);
    free(it->modules);
    free(it->launches);
    free(it->parameters);
    free(it->values);
    free(it->addresses);
    free(it);
}

/* ---- runs ---- */

static int send_inputs(sbrt_instance *it, int where, const void *coords, const void *features, int64_t n_rows,
                       sbrt_error *error)
{
    const void *given[2];
    int i;
    given[0] = coords;
    given[1] = features;
    /* Kernels read the last row's number. A fill carries it along; a copy would wait for another engine. */
    DRIVE(it->driver.fill(it->memory + it->program->count_at, (unsigned)(int32_t)(n_rows - 1), 1, it->stream),
          "send the number of rows");
    for (i = 0; i < 2 && n_rows > 0; i++) {
        const tensor_record *input = TENSOR(it->model, it->program->inputs[0] + (uint32_t)i);
        size_t size = (size_t)(tensor_bytes(input, 0) * (uint64_t)n_rows);
        unsigned char *to = it->memory + input->at;
        if (where == SBRT_HOST)
            DRIVE(it->driver.to_device(to, given[i], size, it->stream), "copy the input");
        else {
            void *from;
            memcpy(&from, &given[i], sizeof from);
            DRIVE(it->driver.between(to, from, size, it->stream), "copy the input");
        }
    }
    return SBRT_OK;
}

static int queue_step(sbrt_instance *it, uint32_t number, sbrt_error *error)
{
    const program_record *program = it->program;
    const step_record *step = STEP(it->model, program->steps[0] + number);
    if (step->kind == LAUNCH) {
        const kernel_record *kernel = KERNEL(it->model, program->kernels[0] + step->kernel);
        DRIVE(it->driver.launch(it->launches[number].function, step->grid[0], step->grid[1], step->grid[2],
                                kernel->threads, 1, 1, kernel->shared, it->stream, it->launches[number].parameters,
                                NULL),
              "launch a kernel");
    } else if (step->kind == FILL)
        DRIVE(it->driver.fill(it->memory + step->to, step->value, (size_t)(step->size / 4), it->stream), "fill memory");
    else
        DRIVE(it->driver.between(it->memory + step->to, it->memory + step->from, (size_t)step->size, it->stream),
              "copy memory");
    return SBRT_OK;
}

static int queue_counters(sbrt_instance *it, sbrt_error *error)
{
    DRIVE(it->driver.to_host(it->host, it->memory + it->program->flags_at, 16, it->stream), "read counters");
    if (it->counters_size > 0)
        DRIVE(it->driver.to_host(it->host + 16, it->memory + it->counters, (size_t)it->counters_size, it->stream),
              "read counters");
    return SBRT_OK;
}

/* All that a run does behind the copies of its input: steps, and what they counted. */
static int queue_all(sbrt_instance *it, sbrt_error *error)
{
    uint32_t i;
    int code = SBRT_OK;
    for (i = 0; i < it->program->steps[1] && !code; i++)
        code = queue_step(it, i, error);
    return code ? code : queue_counters(it, error);
}

/* The same while a graph is captured, with steps that wait for no more than they have to. nodes, waited: of every step
 * its node in the graph; of the one that is queued, those that it waits for. */
static int queue_graph(sbrt_instance *it, void **nodes, void **waited, sbrt_error *error)
{
    const program_record *program = it->program;
    uint32_t number, edge = 0;
    size_t n_waited;
    int code;
    for (number = 0; number < program->steps[1]; number++) {
        void *const *captured = NULL;
        unsigned long long id;
        int status = 0;
        for (n_waited = 0; edge < program->edges[1] && EDGE(it->model, program->edges[0] + edge)->to == number; edge++)
            waited[n_waited++] = nodes[EDGE(it->model, program->edges[0] + edge)->from];
        DRIVE(it->driver.wait_for(it->stream, waited, n_waited, 1), "order a graph"); /* 1: for those alone */
        if ((code = queue_step(it, number, error)))
            return code;
        DRIVE(it->driver.get_captured(it->stream, &status, &id, NULL, &captured, &n_waited), "order a graph");
        if (n_waited != 1)
            return fail(error, SBRT_DRIVER, "The driver captured %lu nodes for a step; expected 1.",
                        (unsigned long)n_waited);
        nodes[number] = captured[0];
    }
    /* The counters come last, so they wait for all that nothing else waits for. */
    for (edge = 0; edge < program->edges[1]; edge++)
        nodes[EDGE(it->model, program->edges[0] + edge)->from] = NULL;
    for (number = 0, n_waited = 0; number < program->steps[1]; number++)
        if (nodes[number] != NULL)
            waited[n_waited++] = nodes[number];
    DRIVE(it->driver.wait_for(it->stream, waited, n_waited, 1), "order a graph");
    return queue_counters(it, error);
}

/* What a graph is captured from. Drivers of before CUDA 11.3 capture steps one behind another. */
static int queue_captured(sbrt_instance *it, sbrt_error *error)
{
    size_t n_steps = it->program->steps[1], n_edges = it->program->edges[1];
    void **nodes;
    int code;
    if (n_edges == 0 || it->driver.get_captured == NULL || it->driver.wait_for == NULL)
        return queue_all(it, error);
    nodes = calloc(2 * n_steps + n_edges, sizeof *nodes);
    if (nodes == NULL)
        return fail(error, SBRT_MEMORY, "The host has no memory left.");
    code = queue_graph(it, nodes, nodes + n_steps, error);
    free(nodes);
    return code;
}

/* The graph of a run. */
static int capture(sbrt_instance *it, sbrt_error *error)
{
    void *captured = NULL;
    int code, end;
    DRIVE(it->driver.begin_capture(it->stream, 1), "begin a graph"); /* 1: other threads may do what they like */
    code = queue_captured(it, error);
    end = it->driver.end_capture(it->stream, &captured);
    if (!code && end)
        code = refused(it, end, "end a graph", error);
    if (!code && (end = it->driver.make_graph(&it->graph, captured, 0)) != 0) {
        it->graph = NULL;
        code = refused(it, end, "make a graph", error);
    }
    if (captured != NULL)
        it->driver.drop_captured(captured);
    return code;
}

int sbrt_capture(sbrt_instance *it, sbrt_error *error)
{
    int code;
    if (it == NULL)
        return fail(error, SBRT_ARGUMENT, "sbrt_capture got a null pointer.");
    if (it->graph != NULL)
        return fine(error);
    if ((code = enter(it, error)))
        return code;
    code = capture(it, error);
    leave(it);
    return code ? code : fine(error);
}

/* Counters start at -1: rows that were inserted, rows that live, whether probes ran out, new rows. Those of a level, of
 * the last run. */
static const int32_t *counters_of(const sbrt_instance *it, const level_record *level)
{
    return (const int32_t *)(const void *)(it->host + 16 + (level->counters_at - it->counters));
}

static int check_counters(sbrt_instance *it, int64_t n_rows, sbrt_error *error)
{
    const int32_t *input = (const int32_t *)(const void *)it->host;
    uint32_t i;
    if (input[2] > 0)
        return fail(error, SBRT_COORDINATES, "The coordinates cannot be searched; please report them.");
    if ((int64_t)input[1] + 1 != n_rows)
        return fail(error, SBRT_COORDINATES, "%lld of %lld rows have coordinates outside of the grid.",
                    (long long)(n_rows - input[1] - 1), (long long)n_rows);
    if ((int64_t)input[0] + 1 != n_rows)
        return fail(error, SBRT_COORDINATES, "%lld of %lld rows repeat the coordinates of an earlier row.",
                    (long long)(n_rows - input[0] - 1), (long long)n_rows);
    for (i = 0; i < it->program->levels[1]; i++) {
        const level_record *level = LEVEL(it->model, it->program->levels[0] + i);
        const int32_t *own = counters_of(it, level);
        if (own[2] > 0 || own[3] < -1 || (uint64_t)((int64_t)own[3] + 1) > level->capacity)
            return fail(error, SBRT_OVERFLOW,
                        "Level %d of the network has more rows (%lld) than the memory that was planned for it (%llu). "
                        "Package with more --rows, or with an example that is like this input.",
                        (int)level->level, (long long)own[3] + 1, (unsigned long long)level->capacity);
    }
    return SBRT_OK;
}

static int play(sbrt_instance *it, int where, const void *coords, const void *features, int64_t n_rows,
                sbrt_error *error)
{
    int code = send_inputs(it, where, coords, features, n_rows, error), end;
    if (!code && it->graph == NULL)
        code = queue_all(it, error);
    else if (!code && (end = it->driver.launch_graph(it->graph, it->stream)) != 0)
        code = refused(it, end, "launch the graph", error);
    if (code) {
        it->driver.wait(it->stream); /* what is queued reads the caller's memory */
        return code;
    }
    DRIVE(it->driver.wait(it->stream), "finish the run");
    return check_counters(it, n_rows, error);
}

int sbrt_run(sbrt_instance *it, int where, const void *coords, const void *features, int64_t n_rows, sbrt_error *error)
{
    int code;
    if (it == NULL || (n_rows > 0 && (coords == NULL || features == NULL)))
        return fail(error, SBRT_ARGUMENT, "sbrt_run got a null pointer.");
    if (where != SBRT_HOST && where != SBRT_DEVICE)
        return fail(error, SBRT_ARGUMENT, "where is %d; expected SBRT_HOST or SBRT_DEVICE.", where);
    if (n_rows < 0 || n_rows > it->limit)
        return fail(error, SBRT_ROWS, "%lld rows; this instance takes 0 to %lld.", (long long)n_rows,
                    (long long)it->limit);
    it->rows = -1;
    if ((code = enter(it, error)))
        return code;
    code = play(it, where, coords, features, n_rows, error);
    leave(it);
    if (code)
        return code;
    it->rows = n_rows;
    return fine(error);
}

static int describe(const sbrt_instance *it, const uint32_t part[2], int index, sbrt_tensor *tensor, sbrt_error *error)
{
    const tensor_record *own;
    uint32_t i;
    if (it == NULL || tensor == NULL)
        return fail(error, SBRT_ARGUMENT, "a null pointer was given for the instance or the tensor.");
    if (index < 0 || (uint32_t)index >= part[1])
        return fail(error, SBRT_ARGUMENT, "tensor %d; there are %lu, from 0 on.", index, (unsigned long)part[1]);
    own = TENSOR(it->model, part[0] + (uint32_t)index);
    memset(tensor, 0, sizeof *tensor);
    tensor->name = text(it->model, own->name);
    tensor->dtype = (int)own->dtype;
    tensor->level = own->level;
    tensor->n_dims = (int)own->n_dims;
    for (i = 0; i < own->n_dims; i++)
        tensor->dims[i] = (int64_t)own->dims[i];
    tensor->data = it->memory + own->at;
    tensor->rows = own->level < 0 ? tensor->dims[0] : it->rows;
    for (i = 0; own->level > 0 && it->rows >= 0 && i < it->program->levels[1]; i++) {
        const level_record *level = LEVEL(it->model, it->program->levels[0] + i);
        if (level->level == own->level)
            tensor->rows = (int64_t)counters_of(it, level)[3] + 1;
    }
    return fine(error);
}

int sbrt_playing(const sbrt_instance *it, sbrt_program *program, sbrt_error *error)
{
    if (it == NULL || program == NULL)
        return fail(error, SBRT_ARGUMENT, "sbrt_playing got a null pointer.");
    describe_program(it->model, it->program, program);
    return fine(error);
}

int sbrt_input(const sbrt_instance *it, int index, sbrt_tensor *tensor, sbrt_error *error)
{
    return describe(it, it == NULL ? NULL : it->program->inputs, index, tensor, error);
}

int sbrt_output(const sbrt_instance *it, int index, sbrt_tensor *tensor, sbrt_error *error)
{
    return describe(it, it == NULL ? NULL : it->program->outputs, index, tensor, error);
}

static int copy_out(const sbrt_instance *it, const sbrt_tensor *tensor, void *memory, size_t size, sbrt_error *error)
{
    int code = enter(it, error);
    if (code)
        return code;
    code = it->driver.to_host(memory, tensor->data, size, it->stream);
    if (!code)
        code = it->driver.wait(it->stream);
    leave(it);
    return code ? refused(it, code, "copy an output", error) : fine(error);
}

int sbrt_read(sbrt_instance *it, int index, void *memory, size_t size, sbrt_error *error)
{
    sbrt_tensor tensor;
    uint64_t needed;
    int code = sbrt_output(it, index, &tensor, error);
    if (code)
        return code;
    if (memory == NULL)
        return fail(error, SBRT_ARGUMENT, "sbrt_read got a null pointer.");
    if (it->rows < 0)
        return fail(error, SBRT_ARGUMENT, "There is no result: the last run failed, or there was none.");
    needed = tensor_bytes(TENSOR(it->model, it->program->outputs[0] + (uint32_t)index), 0) * (uint64_t)tensor.rows;
    if (size < needed)
        return fail(error, SBRT_ARGUMENT, "%llu bytes of memory; output %d has %llu.", (unsigned long long)size, index,
                    (unsigned long long)needed);
    return needed == 0 ? fine(error) : copy_out(it, &tensor, memory, (size_t)needed, error);
}
