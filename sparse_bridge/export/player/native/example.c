/* Plays a package on the scenes that were recorded with it, and compares.
 *
 *   run_package FOLDER [--repeat N]
 *
 * Exits with 0 where all results agree, 1 where one differs, 2 where the package cannot run. */
#define _POSIX_C_SOURCE 200809L
#include "sparse_bridge_rt.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MOST_TENSORS 32

typedef struct {
    int dtype, n_dims;
    int64_t dims[SBRT_MAX_DIMS];
    size_t size; /* bytes */
    double limit; /* of the error of an output, as a share of the RMS */
    void *values;
} tensor;

typedef struct {
    int n_inputs, n_outputs;
    tensor inputs[2], outputs[MOST_TENSORS];
} scene;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return 1e3 * (double)time.tv_sec + 1e-6 * (double)time.tv_nsec;
}

static int dtype_of(const char *name, size_t *size)
{
    static const struct {
        const char *name;
        int dtype;
        size_t size;
    } known[] = {{"float16", SBRT_FLOAT16, 2}, {"float32", SBRT_FLOAT32, 4}, {"int32", SBRT_INT32, 4},
                 {"int64", SBRT_INT64, 8},     {"uint8", SBRT_UINT8, 1},     {"bfloat16", SBRT_BFLOAT16, 2}};
    size_t i;
    for (i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(name, known[i].name) == 0) {
            *size = known[i].size;
            return known[i].dtype;
        }
    return 0;
}

/* A line of scenes.txt, DTYPE DIMENSIONS SIZE ..., and its values, which come next in scenes.bin. */
static int read_tensor(FILE *text, FILE *values, tensor *it)
{
    char name[32];
    int i;
    if (fscanf(text, "%31s %d", name, &it->n_dims) != 2 || it->n_dims < 1 || it->n_dims > SBRT_MAX_DIMS)
        return 0;
    it->dtype = dtype_of(name, &it->size);
    if (it->dtype == 0)
        return 0;
    for (i = 0; i < it->n_dims; i++) {
        if (fscanf(text, "%" SCNd64, &it->dims[i]) != 1 || it->dims[i] < 0 || it->dims[i] > INT32_MAX)
            return 0;
        it->size *= (size_t)it->dims[i];
    }
    it->values = malloc(it->size + 1);
    return it->values != NULL && fread(it->values, 1, it->size, values) == it->size;
}

/* 1: a scene, with the word behind it in `word`; 0: there is none left; -1: the files do not fit. */
static int read_scene(FILE *text, FILE *values, scene *it, char word[32])
{
    memset(it, 0, sizeof *it);
    if (word[0] == '\0' && fscanf(text, "%31s", word) != 1)
        return 0;
    if (strcmp(word, "scene") != 0)
        return -1;
    while (word[0] = '\0', fscanf(text, "%31s", word) == 1 && strcmp(word, "scene") != 0) {
        tensor *next;
        if (strcmp(word, "input") == 0 && it->n_inputs < 2)
            next = &it->inputs[it->n_inputs++];
        else if (strcmp(word, "output") == 0 && it->n_outputs < MOST_TENSORS) {
            next = &it->outputs[it->n_outputs++];
            if (fscanf(text, "%lf", &next->limit) != 1)
                return -1;
        } else
            return -1;
        if (!read_tensor(text, values, next))
            return -1;
    }
    return it->n_inputs == 2 ? 1 : -1;
}

static void drop(scene *it)
{
    int i;
    for (i = 0; i < it->n_inputs; i++)
        free(it->inputs[i].values);
    for (i = 0; i < it->n_outputs; i++)
        free(it->outputs[i].values);
}

/* Half precision: its bits in those of a float, whose exponents begin 112 lower. */
static double half(uint16_t bits)
{
    int finite = (bits & 0x7c00) != 0x7c00;
    uint32_t wide = (uint32_t)(bits & 0x7fff) << 13 | (finite ? 0 : 0x7f800000u);
    float value;
    memcpy(&value, &wide, sizeof value);
    return (bits >> 15 ? -1.0 : 1.0) * (finite ? value * 0x1p112 : (double)value);
}

/* The upper half of a float's bits. */
static double brain(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static double value_at(const tensor *it, const void *values, size_t index)
{
    switch (it->dtype) {
    case SBRT_FLOAT16:
        return half(((const uint16_t *)values)[index]);
    case SBRT_BFLOAT16:
        return brain(((const uint16_t *)values)[index]);
    case SBRT_FLOAT32:
        return ((const float *)values)[index];
    case SBRT_INT32:
        return ((const int32_t *)values)[index];
    case SBRT_INT64:
        return (double)((const int64_t *)values)[index];
    default:
        return ((const unsigned char *)values)[index];
    }
}

/* RMS of the difference, as a share of the RMS of what was expected. */
static double error_of(const tensor *expected, const void *result)
{
    static const size_t BYTES[] = {0, 2, 4, 4, 8, 1, 2}; /* by dtype */
    size_t i, n = expected->size / BYTES[expected->dtype];
    double difference = 0, all = 0;
    for (i = 0; i < n; i++) {
        double want = value_at(expected, expected->values, i), got = value_at(expected, result, i);
        difference += (got - want) * (got - want);
        all += want * want;
    }
    return difference == 0 ? 0 : sqrt(difference / all);
}

/* Whether an output of the last run is what was expected. */
static int agrees(sbrt_instance *net, int index, const tensor *expected, double *worst)
{
    sbrt_error error;
    sbrt_tensor own;
    void *result = malloc(expected->size + 1);
    int good = 0, i;
    if (result != NULL && !sbrt_output(net, index, &own, &error) && own.dtype == expected->dtype &&
        own.n_dims == expected->n_dims && (own.level < 0 || own.rows == expected->dims[0])) {
        for (good = 1, i = 1; i < own.n_dims; i++)
            good = good && own.dims[i] == expected->dims[i];
        good = good && !sbrt_read(net, index, result, expected->size, &error);
    }
    if (good) {
        double difference = error_of(expected, result);
        *worst = difference > *worst ? difference : *worst;
        good = difference <= expected->limit; /* not so for NaN */
    }
    free(result);
    return good;
}

/* 0: all agree; 1: one differs; 2: it does not run. */
static int play(sbrt_instance *net, const scene *it, int repeat)
{
    int first = it->inputs[0].dtype == SBRT_INT32 ? 0 : 1, i, good = 1;
    const tensor *coords = &it->inputs[first], *features = &it->inputs[1 - first];
    double least = INFINITY, worst = 0;
    sbrt_error error;
    for (i = 0; i < repeat; i++) {
        double begin = now();
        if (sbrt_run(net, SBRT_HOST, coords->values, features->values, coords->dims[0], &error)) {
            fprintf(stderr, "%s\n", error.text);
            return 2;
        }
        least = now() - begin < least ? now() - begin : least;
    }
    printf("%" PRId64 " rows, %g ms, ", coords->dims[0], least);
    fflush(stdout); /* the results are there; to compare them takes longer */
    for (i = 0; i < it->n_outputs; i++)
        good = agrees(net, i, &it->outputs[i], &worst) && good;
    printf("error %g of the RMS: %s\n", worst, good ? "ok" : "DIFFERS");
    fflush(stdout);
    return good ? 0 : 1;
}

static int play_all(sbrt_instance *net, const char *folder, int repeat)
{
    char path[2][4096], word[32] = "";
    FILE *text, *values;
    scene it;
    int status = 0, more = 0;
    snprintf(path[0], sizeof path[0], "%s/scenes.txt", folder);
    snprintf(path[1], sizeof path[1], "%s/scenes.bin", folder);
    text = fopen(path[0], "r");
    values = fopen(path[1], "rb");
    while (text != NULL && values != NULL && status < 2 && (more = read_scene(text, values, &it, word)) > 0) {
        int one = play(net, &it, repeat);
        status = one > status ? one : status;
        drop(&it);
    }
    if (text == NULL || values == NULL || more < 0) {
        fprintf(stderr, "scenes.txt and scenes.bin in %s cannot be read.\n", folder);
        status = 2;
    }
    if (text != NULL)
        fclose(text);
    if (values != NULL)
        fclose(values);
    return status;
}

int main(int count, char **words)
{
    const char *folder = ".";
    char path[4096];
    int repeat = 1, status, i;
    sbrt_model *model = NULL;
    sbrt_instance *net = NULL;
    sbrt_error error;
    for (i = 1; i < count; i++) {
        if (strcmp(words[i], "--repeat") == 0 && i + 1 < count && atoi(words[i + 1]) > 0)
            repeat = atoi(words[++i]);
        else if (words[i][0] == '-') {
            fprintf(stderr, "usage: run_package FOLDER [--repeat N]\n");
            return 2;
        } else
            folder = words[i];
    }
    snprintf(path, sizeof path, "%s/model.sbp", folder);
    if (sbrt_load_file(path, &model, &error) || sbrt_create(model, 0, NULL, 0, &net, &error) ||
        sbrt_capture(net, &error)) {
        fprintf(stderr, "%s\n", error.text);
        sbrt_destroy(net);
        sbrt_unload(model);
        return 2;
    }
    status = play_all(net, folder, repeat);
    sbrt_destroy(net);
    sbrt_unload(model);
    return status;
}
