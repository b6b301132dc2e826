/* SPDX-License-Identifier: MIT */
/*
 * usage: loaded LIBRARY COPY
 *
 * Opens a shared library twice and a copy of its file once, so that the
 * process holds two libraries of the same names, and computes the same with
 * both before and after one of them is closed.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include <qkv/qkv.h>

typedef qkv_status attention_fn(const qkv_attention_desc *, void *, size_t);
typedef qkv_status size_fn(const qkv_attention_desc *, int64_t, size_t *);

enum { ROWS = 5, KEYS = 9, DIM = 7 };
static _Alignas(QKV_SCRATCH_ALIGN) unsigned char scratch[1 << 21];

/* memcpy, as ISO C has no cast from an object's address to a function's. */
static int compute(void *library, float out[ROWS * DIM])
{
    attention_fn *attention = NULL;
    size_fn *size = NULL;
    void *symbols[] = {dlsym(library, "qkv_attention"),
                       dlsym(library, "qkv_attention_scratch_size")};
    memcpy(&attention, &symbols[0], sizeof symbols[0]);
    memcpy(&size, &symbols[1], sizeof symbols[1]);
    if (!attention || !size)
        return 1;

    float q[ROWS * DIM], k[KEYS * DIM], v[KEYS * DIM];
    for (int i = 0; i < ROWS * DIM; i++)
        q[i] = (float)(i % 11) * 0.25f - 1.0f;
    for (int i = 0; i < KEYS * DIM; i++) {
        k[i] = (float)(i % 7) * 0.5f - 1.5f;
        v[i] = (float)(i % 13);
    }
    const qkv_attention_desc desc = {.size = sizeof desc,
                                     .q_len = ROWS,
                                     .kv_len = KEYS,
                                     .head_dim = DIM,
                                     .query = {.data = q},
                                     .key = {.data = k},
                                     .value = {.data = v},
                                     .out = {.data = out}};
    size_t bytes = 0;
    return size(&desc, 1, &bytes) != QKV_OK || bytes > sizeof scratch ||
           attention(&desc, scratch, bytes) != QKV_OK;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    void *again = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    void *copy = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
    if (!library || library != again || !copy || copy == library)
        return fprintf(stderr, "loaded: %s\n", dlerror()), 1;

    float first[ROWS * DIM], second[ROWS * DIM], third[ROWS * DIM];
    if (compute(library, first) || compute(copy, second) ||
        memcmp(first, second, sizeof first) != 0)
        return fprintf(stderr, "loaded: the two copies differ\n"), 1;
    if (dlclose(again) || dlclose(library) || compute(copy, third) ||
        memcmp(first, third, sizeof first) != 0)
        return fprintf(stderr, "loaded: the copy fails after the other was closed\n"), 1;
    library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library || compute(library, third) || memcmp(first, third, sizeof first) != 0)
        return fprintf(stderr, "loaded: opened again, it fails\n"), 1;
    dlclose(library);
    dlclose(copy);
    return 0;
}
