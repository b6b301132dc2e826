/* SPDX-License-Identifier: MIT */
#include "prefill.h"

#include <math.h>
#include <stddef.h>

#include "internal.h"
#include "measure.h"

static const bench_prefill rows[] = {
    {"P512", "P512", "qkv_attention", 0.82, 0.79},
    {"P1024", "P1024", "qkv_attention", 0.88, 0.84},
    {"P4096", "P4096", "qkv_attention", 0.88, 0.84},
    {"ViT197", "ViT197", "qkv_attention", 0.72, 0.70},
    {"P512c", "P512c", "qkv_attention", 0.72, 0.70},
    {"P1024c", "P1024c", "qkv_attention", 0.84, 0.80},
    {"P4096c", "P4096c", "qkv_attention", 0.86, 0.82},
    {"chunk 256 on 4096", "8,2,256,4096,128,128c", "qkv_attention", 0.84, 0.80},
    {"1024, head_dim 32", "8,8,1024,1024,32,32", "qkv_attention", 0.76, 0.73},
    {"1024, head_dim 40", "8,8,1024,1024,40,40", "qkv_attention", 0.76, 0.73},
    {"1024, head_dim 72", "8,8,1024,1024,72,72", "qkv_attention", 0.76, 0.73},
    {"1024, head_dim 80", "8,8,1024,1024,80,80", "qkv_attention", 0.76, 0.73},
    {"1024, head_dim 96", "8,8,1024,1024,96,96", "qkv_attention", 0.76, 0.73},
    {"1024, head_dim 112", "8,8,1024,1024,112,112", "qkv_attention", 0.76, 0.73},
    {"1024, head_dim 192", "8,8,1024,1024,192,192", "qkv_attention", 0.76, 0.73},
    {"1024, head_dim 256", "8,8,1024,1024,256,256", "qkv_attention", 0.76, 0.73},
    {"512 x 512 x 1536", "512x512x1536", "qkv_project", 0.88, 0.88},
    {"128 x 4096 x 4096", "128x4096x4096", "qkv_project", 0.88, 0.88},
    {"16 x 4096 x 4096", "16x4096x4096", "qkv_project", 0.85, 0.85},
};

const bench_prefill *bench_prefill_at(int index)
{
    return index >= 0 && index < (int)(sizeof rows / sizeof *rows) ? &rows[index] : NULL;
}

double bench_prefill_bar(const bench_prefill *row, int isa)
{
    return isa == QKV_ISA_avx512 ? row->avx512 : isa == QKV_ISA_avx2 ? row->avx2 : BENCH_NONE;
}
