/* SPDX-License-Identifier: MIT */
/*
 * The tables of kernels, and which one is in use.
 *
 * Nothing runs before main(): the first call that needs a kernel detects
 * the CPU. Two threads that come first together both detect and store the
 * same result, so no lock is needed and readers never wait.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"
#include "internal.h"
#include "tables.h"

#define QKV_KERNEL(op, scalar, avx2, avx512, neon) .op = qkv_##op##_##scalar,
static const qkv_kernels table_scalar = {QKV_TABLE_HEAD(scalar)
#include "kernels.def"
};
#undef QKV_KERNEL

#ifdef QKV_WITH_avx2
#define QKV_KERNEL(op, scalar, avx2, avx512, neon) .op = qkv_##op##_##avx2,
static const qkv_kernels table_avx2 = {QKV_TABLE_HEAD(avx2)
#include "kernels.def"
};
#undef QKV_KERNEL
#endif

#ifdef QKV_WITH_avx512
#define QKV_KERNEL(op, scalar, avx2, avx512, neon) .op = qkv_##op##_##avx512,
static const qkv_kernels table_avx512 = {QKV_TABLE_HEAD(avx512)
#include "kernels.def"
};
#undef QKV_KERNEL
#endif

#ifdef QKV_WITH_neon
#define QKV_KERNEL(op, scalar, avx2, avx512, neon) .op = qkv_##op##_##neon,
static const qkv_kernels table_neon = {QKV_TABLE_HEAD(neon)
#include "kernels.def"
};
#undef QKV_KERNEL
#endif

static const qkv_kernels *const tables[QKV_ISA_COUNT] = {
    [QKV_ISA_scalar] = &table_scalar,
#ifdef QKV_WITH_avx2
    [QKV_ISA_avx2] = &table_avx2,
#endif
#ifdef QKV_WITH_avx512
    [QKV_ISA_avx512] = &table_avx512,
#endif
#ifdef QKV_WITH_neon
    [QKV_ISA_neon] = &table_neon,
#endif
};

static const char *const names[QKV_ISA_COUNT] = {
#define QKV_ISA(name, ...) #name,
#include "isas.def"
#undef QKV_ISA
};

/* What was found at first use, in one word so that it is seen whole. */
enum {
    FOUND_USABLE = 0xff,     /* bit i: ISA i is compiled in and supported */
    FOUND_CHOICE_SHIFT = 8,  /* 4 bits: the automatic choice */
    FOUND_LOWERED = 1 << 12, /* QKV_ISA lowered it */
    FOUND_IGNORED = 1 << 13, /* QKV_ISA was set and passed over */
    FOUND_DONE = 1 << 14
};
static atomic_uint found_word;

/* The table in use: NULL until first use. */
static _Atomic(const qkv_kernels *) active;
/* 1 while qkv_isa_select() forces it. */
static atomic_bool forced;

static unsigned find(void)
{
    const qkv_isa_verdicts verdicts = qkv_isas_detect();
    unsigned usable = 0;
    for (int i = 0; i < QKV_ISA_COUNT; i++)
        if (tables[i] && !verdicts.missing[i])
            usable |= 1u << i;

    int ignored;
    const int best = qkv_isa_choose(usable, NULL, &ignored);
    const int choice = qkv_isa_choose(usable, getenv("QKV_ISA"), &ignored);
    return usable | (unsigned)choice << FOUND_CHOICE_SHIFT | (choice < best ? FOUND_LOWERED : 0u) |
           (ignored ? FOUND_IGNORED : 0u) | FOUND_DONE;
}

static unsigned found(void)
{
    unsigned word = atomic_load_explicit(&found_word, memory_order_acquire);
    if (!word) {
        /* The environment may have changed between two first users: the
         * first to store wins. */
        unsigned expected = 0;
        word = find();
        if (!atomic_compare_exchange_strong(&found_word, &expected, word))
            word = expected;
    }
    return word;
}

static const qkv_kernels *automatic(void)
{
    return tables[found() >> FOUND_CHOICE_SHIFT & 15];
}

const qkv_kernels *qkv_kernels_of(int isa)
{
    return isa >= 0 && isa < QKV_ISA_COUNT ? tables[isa] : NULL;
}

const qkv_kernels *qkv_kernels_active(void)
{
    const qkv_kernels *table = atomic_load_explicit(&active, memory_order_acquire);
    if (!table) {
        const qkv_kernels *expected = NULL;
        table = automatic();
        if (!atomic_compare_exchange_strong(&active, &expected, table))
            table = expected;
    }
    return table;
}

qkv_status qkv_isa_select(const char *name)
{
    if (!name) {
        atomic_store(&forced, false);
        atomic_store_explicit(&active, automatic(), memory_order_release);
        return QKV_OK;
    }
    for (int i = 0; i < QKV_ISA_COUNT; i++) {
        if (strcmp(name, names[i]) == 0 && found() >> i & 1) {
            atomic_store(&forced, true);
            atomic_store_explicit(&active, tables[i], memory_order_release);
            return QKV_OK;
        }
    }
    return QKV_E_ISA;
}

const char *qkv_isa_name(void)
{
    return qkv_kernels_active()->name;
}

int32_t qkv_isa_count(void)
{
    return QKV_ISA_COUNT;
}

static const char *reason_selected(unsigned word)
{
    if (atomic_load(&forced))
        return "selected by a call";
    if (word & FOUND_LOWERED)
        return "selected: QKV_ISA lowers the choice to it";
    if (word & FOUND_IGNORED)
        return "selected: the highest supported; QKV_ISA names none that is usable here and was "
               "ignored";
    return "selected: the highest supported";
}

qkv_status qkv_isa_get(int32_t index, qkv_isa_info *info)
{
    if (!info)
        return QKV_E_NULL;
    if (index < 0 || index >= QKV_ISA_COUNT)
        return QKV_E_INDEX;

    const unsigned word = found();
    const char *missing = qkv_isas_detect().missing[index];
    info->name = names[index];
    info->compiled = tables[index] != NULL;
    info->supported = missing == NULL;
    info->selected = tables[index] == qkv_kernels_active();
    if (missing)
        info->reason = missing;
    else if (!info->compiled)
        info->reason = "not compiled into this library";
    else if (info->selected)
        info->reason = reason_selected(word);
    else
        info->reason = "supported, not selected";
    return QKV_OK;
}
