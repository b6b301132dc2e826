/* SPDX-License-Identifier: MIT */
/*
 * The conversions of every ISA that runs here on any bytes, in memory of the
 * exact size: what the scalar definition gives, bit for bit (any NaN for a
 * NaN), and a narrowed number widens to one that is no further away than its
 * neighbours.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"
#include "internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void *copy_of(const void *data, size_t bytes)
{
    void *copy = malloc(bytes);
    if (bytes)
        memcpy(copy, data, bytes);
    return copy;
}

static void expect_floats(const float *got, const float *want, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (memcmp(got + i, want + i, sizeof *got) != 0 && !(isnan(got[i]) && isnan(want[i])))
            abort();
}

static void widen_all(const uint8_t *data, size_t size)
{
    const int64_t n = (int64_t)(size / 2);
    uint16_t *x = copy_of(data, (size_t)n * 2);
    float *want[2], *got = malloc((size_t)n * 4);
    for (int i = 0; i < 2; i++)
        want[i] = malloc((size_t)n * 4);
    qkv_widen_f16_scalar(x, want[0], n);
    qkv_widen_bf16_scalar(x, want[1], n);
    for (int isa = 1; isa < QKV_ISA_COUNT; isa++) {
        const qkv_kernels *k = qkv_kernels_of(isa);
        if (!k || qkv_isas_detect().missing[isa])
            continue;
        k->widen_f16(x, got, n);
        expect_floats(got, want[0], n);
        k->widen_bf16(x, got, n);
        expect_floats(got, want[1], n);
    }
    free(want[0]);
    free(want[1]);
    free(got);
    free(x);
}

typedef void narrow_fn(const float *x, uint16_t *y, int64_t n);
typedef void widen_fn(const uint16_t *x, float *y, int64_t n);

static void narrow_all(const uint8_t *data, size_t size, int which)
{
    const int64_t n = (int64_t)(size / 4);
    float *x = copy_of(data, (size_t)n * 4), *back = malloc((size_t)n * 4);
    float *want_back = malloc((size_t)n * 4);
    uint16_t *want = malloc((size_t)n * 2), *got = malloc((size_t)n * 2);
    narrow_fn *narrow = which ? qkv_narrow_bf16_scalar : qkv_narrow_f16_scalar;
    widen_fn *widen = which ? qkv_widen_bf16_scalar : qkv_widen_f16_scalar;
    narrow(x, want, n);
    widen(want, want_back, n);
    for (int isa = 1; isa < QKV_ISA_COUNT; isa++) {
        const qkv_kernels *k = qkv_kernels_of(isa);
        if (!k || qkv_isas_detect().missing[isa])
            continue;
        (which ? k->narrow_bf16 : k->narrow_f16)(x, got, n);
        widen(got, back, n);
        expect_floats(back, want_back, n);
    }
    for (int64_t i = 0; i < n; i++) {
        uint16_t near[2] = {(uint16_t)(want[i] - 1), (uint16_t)(want[i] + 1)};
        float other[2];
        widen(near, other, 2);
        const double off = fabs((double)want_back[i] - (double)x[i]);
        for (int k = 0; k < 2; k++)
            if (isfinite(want_back[i]) && isfinite(other[k]) && want[i] & 0x7fff &&
                fabs((double)other[k] - (double)x[i]) < off)
                abort();
    }
    free(x);
    free(back);
    free(want_back);
    free(want);
    free(got);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size > 4096)
        return 0;
    widen_all(data, size);
    narrow_all(data, size, 0);
    narrow_all(data, size, 1);
    return 0;
}
