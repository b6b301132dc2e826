/* SPDX-License-Identifier: MIT */
/*
 * qkv-bench: how fast each kernel and function is, as a fraction of what
 * this machine can do at best, measured in the same rounds.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cases.h"
#include "measure.h"
#include "options.h"
#include "prefill.h"
#include "report.h"
#include "timing.h"

_Static_assert(BENCH_ENTRIES_MAX >= 32, "room for the kernels and functions");

static void list(void)
{
    bench_shape s;
    puts("Shapes (q_heads/kv_heads, queries x keys, head_dim):");
    for (int i = 0; bench_shape_named(i, &s); i++)
        printf("  %-8s %2lld/%-2lld %4lld x %-5lld %3lld%s\n", s.name, (long long)s.q_heads,
               (long long)s.kv_heads, (long long)s.q_len, (long long)s.kv_len,
               (long long)s.head_dim,
               s.causal                   ? "  causal"
               : bench_shape_is_batch(&s) ? "  batch, in pages"
                                          : "");
    puts("Kernels and functions:");
    for (int i = 0; i < bench_entry_count(); i++)
        printf("  %s\n", bench_entry_at(i)->name);
    puts("ISAs:");
    for (int i = 0; i < qkv_isa_count(); i++) {
        qkv_isa_info info;
        if (qkv_isa_get(i, &info) == QKV_OK)
            printf("  %-8s %s\n", info.name, info.reason);
    }
}

static bench_order order_from(const bench_options *o)
{
    return (bench_order){
        .threads = o->threads,
        .dtype = o->dtype,
        .rounds = o->rounds,
        .seconds = o->seconds,
        .cold = o->cold,
    };
}

static bool wanted(const bench_options *o, int entry, const bench_shape *shape)
{
    const bench_entry *e = bench_entry_at(entry);
    if (shape->product && strcmp(e->name, "qkv_project") != 0)
        return false;
    if (bench_shape_is_batch(shape) && strcmp(e->name, "qkv_attention") != 0)
        return false;
    if (o->dtype != QKV_F32 && !e->dtypes)
        return false;
    if (o->entries_named)
        return o->entries[entry];
    return o->threads == 1 || e->threads;
}

/* Measures and prints one case. */
static void run_case(const bench_options *o, const bench_order *order)
{
    bench_result result;
    const bool suits = bench_measure_case(order, &result);
    bench_progress_erase();
    if (suits && o->json)
        bench_print_json(&result, BENCH_NONE);
    else if (suits)
        bench_print_row(&result);
}

/* Runs through what is wanted; with 'all' 0 it only counts. */
static int run_all(const bench_options *o, int all)
{
    const int n_entries = bench_entry_count(), per_shape = QKV_ISA_COUNT * n_entries;
    int done = 0;
    bench_order order = order_from(o);
    for (int i = 0; i < o->n_shapes * per_shape; i++) {
        const int entry = i % n_entries;
        order.shape = &o->shapes[i / per_shape];
        order.isa = i / n_entries % QKV_ISA_COUNT;
        order.entry = bench_entry_at(entry);
        if (!o->isas[order.isa] || !wanted(o, entry, order.shape))
            continue;
        if (all && o->once) {
            bench_run_case(&order);
        } else if (all) {
            bench_progress(done, all, order.entry->name);
            run_case(o, &order);
        }
        done++;
    }
    return done;
}

static const bench_entry *entry_named(const char *name)
{
    int i = 0;
    while (strcmp(bench_entry_at(i)->name, name) != 0)
        i++;
    return bench_entry_at(i);
}

static void run_table_row(const bench_options *o, const bench_prefill *row, int isa)
{
    bench_shape shape;
    bench_order order = order_from(o);
    bench_result result;
    if (!bench_shape_parse(row->shape, &shape))
        bench_refuse("bad shape in the table: %s", row->shape);
    snprintf(shape.name, sizeof shape.name, "%s", row->name);
    order.entry = entry_named(row->kernel);
    order.speedup = o->threads > 1;
    if (order.speedup && !order.entry->threads)
        return;
    if (o->table->dtypes)
        order.dtype = row->dtype;
    order.by_fma = strcmp(row->name, o->table->by_fma) == 0;
    order.shape = &shape;
    order.isa = isa;
    if (!bench_measure_case(&order, &result))
        return;
    const double bar = order.speedup ? BENCH_SPEEDUP_BAR : bench_prefill_bar(row, isa);
    bench_progress_erase();
    if (o->json)
        bench_print_json(&result, bar);
    else if (order.speedup)
        bench_print_speedup_row(&result, bar);
    else
        bench_print_prefill_row(&result, bar);
}

static void run_table(const bench_options *o)
{
    const bench_table *table = o->table;
    int isas = 0, done = 0;
    for (int isa = 0; isa < QKV_ISA_COUNT; isa++)
        isas += o->isas[isa];
    for (int isa = 0; isa < QKV_ISA_COUNT; isa++) {
        for (int i = 0; o->isas[isa] && i < table->count; i++) {
            bench_progress(done++, table->count * isas, table->rows[i].name);
            if (!o->rows || strstr(table->rows[i].name, o->rows))
                run_table_row(o, &table->rows[i], isa);
        }
    }
}

int main(int argc, char **argv)
{
    static bench_options options;
    bench_options_read(&options, argc, argv);
    if (options.list) {
        list();
        return 0;
    }
    if (options.cpu_clock)
        bench_use_cpu_clock();
    if (options.alone)
        bench_only_alone();
    bench_pin(0);
    bench_workers_start(options.threads);
    if (!options.once)
        bench_warm_up(QKV_ISA_scalar, options.seconds < 0.2 ? options.seconds : 0.2);

    if (!options.json && !options.once && !options.table)
        bench_print_head(bench_dtype_name(options.dtype), options.threads, options.rounds,
                         options.cpu_clock);
    if (!options.json && options.table && options.threads > 1)
        bench_print_speedup_head(options.threads);
    else if (!options.json && options.table)
        bench_print_prefill_head();
    if (options.table)
        run_table(&options);
    else
        run_all(&options, run_all(&options, 0));
    bench_workers_stop();
    return 0;
}
