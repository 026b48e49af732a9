/* Loads and plays packages that were damaged at random: fuzz PACKAGE RUNS SEED. Prints how many loaded
 * and how many ran. */
#include "sparse_bridge_rt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 16

static uint64_t state;

static uint64_t draw(uint64_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

static uint32_t crc(const unsigned char *bytes, size_t size)
{
    static uint32_t table[256];
    uint32_t value = 0xffffffffu, i, k;
    if (table[1] == 0)
        for (i = 0; i < 256; i++)
            for (table[i] = i, k = 0; k < 8; k++)
                table[i] = table[i] & 1 ? table[i] >> 1 ^ 0xedb88320u : table[i] >> 1;
    for (; size > 0; size--, bytes++)
        value = value >> 8 ^ table[(value ^ *bytes) & 255];
    return ~value;
}

/* Numbers that lie: near the ends of what a field can hold. */
static uint64_t liar(void)
{
    static const uint64_t NUMBERS[] = {0, 1, 2, 3, 7, 8, 16, 255, 4095, 4096, 65535, 65536, 0x7fffffff, 0x80000000,
                                       0xffffffff, (uint64_t)1 << 32, (uint64_t)1 << 47, ~(uint64_t)0, ~(uint64_t)7,
                                       (uint64_t)1 << 63};
    return NUMBERS[draw(sizeof NUMBERS / sizeof *NUMBERS)];
}

static size_t damage(unsigned char *bytes, size_t size)
{
    uint64_t times = 1 + draw(4), number;
    size_t records = size < 4096 ? size : 4096, at;
    for (; times > 0; times--) {
        switch (draw(4)) {
        case 0:
            bytes[draw(size)] ^= (unsigned char)(1u << draw(8));
            break;
        case 1: /* a field of 32 bits, in the header or the records more often than elsewhere */
            at = draw(2) ? draw(records / 4) * 4 : draw(size / 4) * 4;
            number = liar();
            memcpy(bytes + at, &number, 4);
            break;
        case 2:
            at = draw(2) ? draw(records / 8) * 8 : draw(size / 8) * 8;
            number = liar();
            memcpy(bytes + at, &number, 8);
            break;
        default:
            if (draw(8) == 0)
                size = 24 + draw(size - 24);
        }
        if (size < 200)
            break;
    }
    return size;
}

static int play(const sbrt_model *model)
{
    static int32_t coords[ROWS * 4];
    static float features[ROWS * 64];
    static unsigned char memory[1 << 16];
    sbrt_instance *net;
    sbrt_tensor tensor;
    sbrt_error error;
    int ran = 0, i;
    if (sbrt_create(model, 0, NULL, 0, &net, &error))
        return 0;
    if (!sbrt_input(net, 1, &tensor, &error) && tensor.dims[1] <= 64 && !sbrt_input(net, 0, &tensor, &error) &&
        tensor.dims[1] <= 4)
        ran = sbrt_run(net, SBRT_HOST, coords, features, (int64_t)draw(ROWS + 2), &error) <= SBRT_OVERFLOW;
    for (i = 0; sbrt_output(net, i, &tensor, &error) == SBRT_OK; i++)
        sbrt_read(net, i, memory, sizeof memory, &error);
    sbrt_destroy(net);
    return ran;
}

int main(int count, char **words)
{
    FILE *file = count == 4 ? fopen(words[1], "rb") : NULL;
    unsigned char *whole, *copy;
    size_t size;
    long runs, loaded = 0, ran = 0, i;
    if (file == NULL)
        return 2;
    fseek(file, 0, SEEK_END);
    size = (size_t)ftell(file);
    rewind(file);
    whole = malloc(size);
    if (whole == NULL || fread(whole, 1, size, file) != size)
        return 2;
    fclose(file);
    runs = atol(words[2]);
    state = 88172645463325252u + (uint64_t)atol(words[3]);
    for (i = 0; i < runs; i++) {
        size_t now = size;
        sbrt_model *model = NULL;
        sbrt_program program;
        sbrt_error error;
        copy = malloc(size);
        if (copy == NULL)
            return 2;
        memcpy(copy, whole, size);
        now = damage(copy, size);
        if (draw(16) != 0) { /* else the checksum tells */
            uint64_t length = now;
            uint32_t sum, version = SBRT_VERSION;
            memcpy(copy, whole, 8);
            memcpy(copy + 8, &version, 4);
            memcpy(copy + 16, &length, 8);
            sum = crc(copy + 16, now - 16);
            memcpy(copy + 12, &sum, 4);
        }
        copy = realloc(copy, now);
        if (!sbrt_load_memory(copy, now, &model, &error)) {
            int index;
            loaded++;
            for (index = 0; index < sbrt_count(model); index++)
                sbrt_info(model, index, &program, &error);
            ran += play(model);
        } else if (error.text[0] == '\0')
            return 3;
        free(copy);
        sbrt_unload(model);
    }
    free(whole);
    printf("%ld %ld\n", loaded, ran);
    return 0;
}
