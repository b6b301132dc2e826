/* SPDX-License-Identifier: MIT */
/*
 * For the files that define tables: the library's table.c, and the tests'
 * tables of kernels that run through SIMDe.
 */
#ifndef QKV_TABLES_H
#define QKV_TABLES_H

#include "internal.h"

/* The first fields of an ISA's table; the kernels follow from kernels.def. */
#define QKV_TABLE_HEAD(isa)                                                                        \
    .name = #isa, .tile_rows = QKV_##isa##_tile_rows, .key_block = QKV_##isa##_key_block,          \
    .value_panel = QKV_##isa##_value_panel, .gemm_cols = QKV_##isa##_gemm_cols,                    \
    .row_limit = QKV_##isa##_row_limit, .row_limit_narrow = QKV_##isa##_row_limit_narrow,          \
    .short_rows = QKV_##isa##_short_rows, .few_rows = QKV_##isa##_few_rows,                        \
    .few_depth = QKV_##isa##_few_depth,

#endif
