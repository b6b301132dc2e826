/* SPDX-License-Identifier: MIT */
#include "prefill.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "internal.h"
#include "measure.h"

static const bench_prefill prefill[] = {
    {"P512", "P512", "qkv_attention", 0.82, 0.79, QKV_F32},
    {"P1024", "P1024", "qkv_attention", 0.88, 0.84, QKV_F32},
    {"P4096", "P4096", "qkv_attention", 0.88, 0.84, QKV_F32},
    {"ViT197", "ViT197", "qkv_attention", 0.72, 0.70, QKV_F32},
    {"P512c", "P512c", "qkv_attention", 0.72, 0.70, QKV_F32},
    {"P1024c", "P1024c", "qkv_attention", 0.84, 0.80, QKV_F32},
    {"P4096c", "P4096c", "qkv_attention", 0.86, 0.82, QKV_F32},
    {"chunk 256 on 4096", "8,2,256,4096,128,128c", "qkv_attention", 0.84, 0.80, QKV_F32},
    {"1024, head_dim 32", "8,8,1024,1024,32,32", "qkv_attention", 0.76, 0.73, QKV_F32},
    {"1024, head_dim 40", "8,8,1024,1024,40,40", "qkv_attention", 0.76, 0.73, QKV_F32},
    {"1024, head_dim 72", "8,8,1024,1024,72,72", "qkv_attention", 0.76, 0.73, QKV_F32},
    {"1024, head_dim 80", "8,8,1024,1024,80,80", "qkv_attention", 0.76, 0.73, QKV_F32},
    {"1024, head_dim 96", "8,8,1024,1024,96,96", "qkv_attention", 0.76, 0.73, QKV_F32},
    {"1024, head_dim 112", "8,8,1024,1024,112,112", "qkv_attention", 0.76, 0.73, QKV_F32},
    {"1024, head_dim 192", "8,8,1024,1024,192,192", "qkv_attention", 0.76, 0.73, QKV_F32},
    {"1024, head_dim 256", "8,8,1024,1024,256,256", "qkv_attention", 0.76, 0.73, QKV_F32},
    {"512 x 512 x 1536", "512x512x1536", "qkv_project", 0.88, 0.88, QKV_F32},
    {"128 x 4096 x 4096", "128x4096x4096", "qkv_project", 0.88, 0.88, QKV_F32},
    {"16 x 4096 x 4096", "16x4096x4096", "qkv_project", 0.85, 0.85, QKV_F32},
};

/*
 * Bound by conversions and lane sums, not by memory: at most 32 us where
 * multiply-adds peak at 170 GFLOP/s, and as much less or more as they are faster
 * or slower.
 */
#define DMHA512_BAR (2.0 * 12 * 512 * (64 + 64) / 170.0 / 32e3)

/* One token against a cache, in every type that a cache may have, and filling it. */
static const bench_prefill decode[] = {
    {"D32768 f32", "D32768", "qkv_attention", 0.82, 0.82, QKV_F32},
    {"D32768 f16", "D32768", "qkv_attention", 0.82, 0.82, QKV_F16},
    {"D32768 bf16", "D32768", "qkv_attention", 0.82, 0.82, QKV_BF16},
    {"D32768 q8_0", "D32768", "qkv_attention", 0.60, 0.60, QKV_Q8_0},
    {"D32768 i8", "D32768", "qkv_attention", 0.60, 0.60, QKV_I8},
    {"D32768 f8_e4m3", "D32768", "qkv_attention", 0.50, 0.50, QKV_F8_E4M3},
    {"D32768 f8_e5m2", "D32768", "qkv_attention", 0.50, 0.50, QKV_F8_E5M2},
    {"D32768 q4_0", "D32768", "qkv_attention", 0.40, 0.40, QKV_Q4_0},
    {"D4096 f32", "D4096", "qkv_attention", 0.82, 0.82, QKV_F32},
    {"D4096 f16", "D4096", "qkv_attention", 0.82, 0.82, QKV_F16},
    {"D4096 bf16", "D4096", "qkv_attention", 0.82, 0.82, QKV_BF16},
    {"D4096 q8_0", "D4096", "qkv_attention", 0.60, 0.60, QKV_Q8_0},
    {"D4096 i8", "D4096", "qkv_attention", 0.60, 0.60, QKV_I8},
    {"D4096 f8_e4m3", "D4096", "qkv_attention", 0.50, 0.50, QKV_F8_E4M3},
    {"D4096 f8_e5m2", "D4096", "qkv_attention", 0.50, 0.50, QKV_F8_E5M2},
    {"D4096 q4_0", "D4096", "qkv_attention", 0.40, 0.40, QKV_Q4_0},
    {"D1024 f32", "D1024", "qkv_attention", 0.78, 0.78, QKV_F32},
    {"D1024 f16", "D1024", "qkv_attention", 0.78, 0.78, QKV_F16},
    {"D1024 bf16", "D1024", "qkv_attention", 0.78, 0.78, QKV_BF16},
    {"D1024 q8_0", "D1024", "qkv_attention", 0.55, 0.55, QKV_Q8_0},
    {"D1024 i8", "D1024", "qkv_attention", 0.55, 0.55, QKV_I8},
    {"D1024 f8_e4m3", "D1024", "qkv_attention", 0.45, 0.45, QKV_F8_E4M3},
    {"D1024 f8_e5m2", "D1024", "qkv_attention", 0.45, 0.45, QKV_F8_E5M2},
    {"D1024 q4_0", "D1024", "qkv_attention", 0.35, 0.35, QKV_Q4_0},
    {"1 x 4096 x 4096 f32", "1x4096x4096", "qkv_project", 0.85, 0.85, QKV_F32},
    {"1 x 4096 x 4096 f16", "1x4096x4096", "qkv_project", 0.85, 0.85, QKV_F16},
    {"1 x 4096 x 4096 bf16", "1x4096x4096", "qkv_project", 0.85, 0.85, QKV_BF16},
    {"batch of 8 f32", "Dbatch", "qkv_attention", 0.78, 0.78, QKV_F32},
    {"batch of 8 f16", "Dbatch", "qkv_attention", 0.78, 0.78, QKV_F16},
    {"batch of 8 bf16", "Dbatch", "qkv_attention", 0.78, 0.78, QKV_BF16},
    {"batch of 8 q8_0", "Dbatch", "qkv_attention", 0.55, 0.55, QKV_Q8_0},
    {"batch of 8 i8", "Dbatch", "qkv_attention", 0.55, 0.55, QKV_I8},
    {"Dmha512 f32", "Dmha512", "qkv_attention", BENCH_NONE, BENCH_NONE, QKV_F32},
    {"Dmha512 f16", "Dmha512", "qkv_attention", DMHA512_BAR, DMHA512_BAR, QKV_F16},
    {"append f32", "D4096", "qkv_kv_append", 0.80, 0.80, QKV_F32},
    {"append f16", "D4096", "qkv_kv_append", 0.80, 0.80, QKV_F16},
    {"append bf16", "D4096", "qkv_kv_append", 0.80, 0.80, QKV_BF16},
    {"append q8_0", "D4096", "qkv_kv_append", 0.80, 0.80, QKV_Q8_0},
    {"append i8", "D4096", "qkv_kv_append", 0.80, 0.80, QKV_I8},
    {"append f8_e4m3", "D4096", "qkv_kv_append", 0.80, 0.80, QKV_F8_E4M3},
    {"append f8_e5m2", "D4096", "qkv_kv_append", 0.80, 0.80, QKV_F8_E5M2},
    {"append q4_0", "D4096", "qkv_kv_append", 0.80, 0.80, QKV_Q4_0},
    {"turn, append f32", "D4096", "qkv_kv_append_rotary", 0.80, 0.80, QKV_F32},
    {"turn, append f16", "D4096", "qkv_kv_append_rotary", 0.80, 0.80, QKV_F16},
    {"turn, append bf16", "D4096", "qkv_kv_append_rotary", 0.80, 0.80, QKV_BF16},
    {"turn, append q8_0", "D4096", "qkv_kv_append_rotary", 0.80, 0.80, QKV_Q8_0},
    {"turn, append i8", "D4096", "qkv_kv_append_rotary", 0.80, 0.80, QKV_I8},
    {"turn, append f8_e4m3", "D4096", "qkv_kv_append_rotary", 0.80, 0.80, QKV_F8_E4M3},
    {"turn, append f8_e5m2", "D4096", "qkv_kv_append_rotary", 0.80, 0.80, QKV_F8_E5M2},
    {"turn, append q4_0", "D4096", "qkv_kv_append_rotary", 0.80, 0.80, QKV_Q4_0},
};

static const bench_table tables[] = {
    {"prefill", prefill, sizeof prefill / sizeof *prefill, false, ""},
    {"decode", decode, sizeof decode / sizeof *decode, true, "Dmha512 f16"},
};

const bench_table *bench_table_named(const char *name)
{
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        if (strcmp(name, tables[i].name) == 0)
            return &tables[i];
    return NULL;
}

double bench_prefill_bar(const bench_prefill *row, int isa)
{
    return isa == QKV_ISA_avx512 ? row->avx512 : isa == QKV_ISA_avx2 ? row->avx2 : BENCH_NONE;
}
