/* SPDX-License-Identifier: MIT */
#include "options.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cases.h"
#include "measure.h"

static const char help[] =
    "Usage: qkv-bench [option]...\n"
    "Times kernels and functions of qkv next to what this machine can do at best.\n"
    "\n"
    "  --shape SHAPE     a name of --list; or q_heads,kv_heads,q_len,kv_len,head_dim,value_dim,\n"
    "                    followed by c if causal, and by pN for pages of N rows; kv_len may be\n"
    "                    a batch, 17+100+9; or ROWSxINxOUT, a product for qkv_project.\n"
    "                    May be repeated. Default: P512, P1024c, D4096\n"
    "  --isa NAME        measure this ISA, may be repeated; default: all that run here\n"
    "  --kernel NAME     measure this one, may be repeated; default: all of --list\n"
    "  --dtype TYPE      element type of public functions: f32 (the default), f16, bf16; or of\n"
    "                    keys and values alone: q8_0, i8, f8_e4m3, f8_e5m2, q4_0\n"
    "  --threads N       workers for qkv_attention, and for its limits; default: 1. With --table\n"
    "                    decode: how much faster they are than one, beside their limits\n"
    "  --seconds S       time for one measurement, limits not counted; default: 0.35\n"
    "  --rounds N        rounds in which work and limits take turns; default: 7\n"
    "  --cold            rotate over copies of the keys and values, 256 MiB in all\n"
    "  --clock CLOCK     wall, or cpu: the thread's own time, for a machine that is shared\n"
    "  --alone           leave out samples taken while another program used the core's other\n"
    "                    hardware thread, which slows the work but hardly its limit\n"
    "  --table TABLE     prefill or decode: its shapes, each beside the figure to reach\n"
    "  --rows TEXT       of the table only the rows whose names contain this\n"
    "  --json            one JSON object a line\n"
    "  --once            run each once, time nothing and print nothing: for counting tools\n"
    "  --list            list shapes, kernels and ISAs\n"
    "  --help, --version\n"
    "\n"
    "Figures hold for this machine and this moment; compare only ratios.\n";

void bench_refuse(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("qkv-bench: ", stderr);
    vfprintf(stderr, format, args);
    fputs("\n", stderr);
    va_end(args);
    exit(2);
}

static double number(const char *option, const char *text, double low, double high)
{
    char *end;
    const double value = strtod(text, &end);
    if (end == text || *end || !isfinite(value) || value < low || value > high)
        bench_refuse("%s takes a number from %g to %g, not '%s'", option, low, high, text);
    return value;
}

static int whole_number(const char *option, const char *text, int high)
{
    const double value = number(option, text, 1, high);
    if (value != floor(value))
        bench_refuse("%s takes a whole number, not '%s'", option, text);
    return (int)value;
}

static void add_shape(bench_options *o, const char *text)
{
    if (o->n_shapes == BENCH_SHAPES_MAX)
        bench_refuse("more than %d shapes", BENCH_SHAPES_MAX);
    if (!bench_shape_parse(text, &o->shapes[o->n_shapes++]))
        bench_refuse("no shape '%s': --list has the names, --help the other forms", text);
}

static void add_isa(bench_options *o, const char *name)
{
    for (int i = 0; i < QKV_ISA_COUNT; i++) {
        qkv_isa_info info;
        if (qkv_isa_get(i, &info) != QKV_OK || strcmp(name, info.name) != 0)
            continue;
        if (!info.compiled || !info.supported)
            bench_refuse("the ISA '%s' cannot run here: %s", name, info.reason);
        o->isas[i] = o->isas_named = true;
        return;
    }
    bench_refuse("no ISA '%s': --list has the names", name);
}

static void add_entry(bench_options *o, const char *name)
{
    for (int i = 0; i < bench_entry_count(); i++) {
        if (strcmp(name, bench_entry_at(i)->name) != 0)
            continue;
        o->entries[i] = o->entries_named = true;
        return;
    }
    bench_refuse("no kernel '%s': --list has the names", name);
}

static void set_dtype(bench_options *o, const char *name)
{
    for (o->dtype = QKV_F32; o->dtype <= QKV_Q4_0; o->dtype++)
        if (strcmp(name, bench_dtype_name(o->dtype)) == 0)
            return;
    bench_refuse("no dtype '%s': see --help", name);
}

static void set_choice(bool *flag, const char *option, const char *value, const char *no,
                       const char *yes)
{
    *flag = strcmp(value, yes) == 0;
    if (!*flag && (!no || strcmp(value, no) != 0))
        bench_refuse("%s takes %s%s%s, not '%s'", option, no ? no : "", no ? " or " : "", yes,
                     value);
}

static void set_table(bench_options *o, const char *name)
{
    o->table = bench_table_named(name);
    if (!o->table)
        bench_refuse("--table takes prefill or decode, not '%s'", name);
}

/* The options that take a value; false if 'name' is none of them. */
static bool set_value(bench_options *o, const char *name, const char *value)
{
    if (strcmp(name, "--shape") == 0)
        add_shape(o, value);
    else if (strcmp(name, "--isa") == 0)
        add_isa(o, value);
    else if (strcmp(name, "--kernel") == 0)
        add_entry(o, value);
    else if (strcmp(name, "--dtype") == 0)
        set_dtype(o, value);
    else if (strcmp(name, "--threads") == 0)
        o->threads = whole_number(name, value, BENCH_THREADS_MAX);
    else if (strcmp(name, "--rounds") == 0)
        o->rounds = whole_number(name, value, BENCH_ROUNDS_MAX);
    else if (strcmp(name, "--seconds") == 0)
        o->seconds = number(name, value, 1e-6, 3600);
    else if (strcmp(name, "--clock") == 0)
        set_choice(&o->cpu_clock, name, value, "wall", "cpu");
    else if (strcmp(name, "--table") == 0)
        set_table(o, value);
    else if (strcmp(name, "--rows") == 0)
        o->rows = value;
    else
        return false;
    return true;
}

static bool takes_value(const char *name)
{
    static const char *const names[] = {"--shape",  "--isa",     "--kernel", "--dtype", "--threads",
                                        "--rounds", "--seconds", "--clock",  "--table", "--rows"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return false;
}

static bool set_flag(bench_options *o, const char *name)
{
    if (strcmp(name, "--cold") == 0)
        o->cold = true;
    else if (strcmp(name, "--json") == 0)
        o->json = true;
    else if (strcmp(name, "--list") == 0)
        o->list = true;
    else if (strcmp(name, "--once") == 0)
        o->once = true;
    else if (strcmp(name, "--alone") == 0)
        o->alone = true;
    else
        return false;
    return true;
}

static void answer(const char *text)
{
    fputs(text, stdout);
    exit(0);
}

/* "--name value" or "--name=value". Returns how many words it was. */
static int read_option(bench_options *o, int left, char **words)
{
    char name[16];
    const char *equals = strchr(words[0], '=');
    const size_t length = equals ? (size_t)(equals - words[0]) : strlen(words[0]);
    snprintf(name, sizeof name, "%.*s", (int)length, words[0]);

    if (length < sizeof name && takes_value(name)) {
        if (!equals && left < 2)
            bench_refuse("%s needs a value", name);
        set_value(o, name, equals ? equals + 1 : words[1]);
        return equals ? 1 : 2;
    }
    if (strcmp(words[0], "--help") == 0)
        answer(help);
    if (strcmp(words[0], "--version") == 0) {
        printf("qkv-bench %d.%d.%d\n", QKV_VERSION_MAJOR, QKV_VERSION_MINOR, QKV_VERSION_PATCH);
        exit(0);
    }
    if (!set_flag(o, words[0]))
        bench_refuse("no option '%s': see --help", words[0]);
    return 1;
}

/* What was not given. The table is about vector ISAs: scalar only by name. */
static void set_defaults(bench_options *o)
{
    if (o->n_shapes == 0 && !o->table) {
        add_shape(o, "P512");
        add_shape(o, "P1024c");
        add_shape(o, "D4096");
    }
    for (int i = 0; !o->isas_named && i < QKV_ISA_COUNT; i++) {
        qkv_isa_info info;
        o->isas[i] = qkv_isa_get(i, &info) == QKV_OK && info.compiled && info.supported &&
                     !(o->table && i == QKV_ISA_scalar);
    }
}

static void check(const bench_options *o)
{
    if (o->table && (o->n_shapes || o->entries_named || o->cold))
        bench_refuse("--table has its own shapes and kernels, and warm caches");
    if (o->table && !o->table->dtypes && o->threads > 1)
        bench_refuse("--table %s is about one thread", o->table->name);
    if (o->rows && !o->table)
        bench_refuse("--rows picks from a --table");
    if (o->table && o->once)
        bench_refuse("--once and --table exclude each other");
    if (o->threads > 1 && o->cpu_clock)
        bench_refuse("--clock cpu tells the time of one thread only");
    for (int i = 0; o->threads > 1 && i < bench_entry_count(); i++)
        if (o->entries[i] && !bench_entry_at(i)->threads)
            bench_refuse("'%s' runs on one thread only", bench_entry_at(i)->name);
}

void bench_options_read(bench_options *options, int argc, char **argv)
{
    *options = (bench_options){.threads = 1, .rounds = 7, .seconds = 0.35};
    for (int i = 1; i < argc;)
        i += read_option(options, argc - i, argv + i);
    check(options);
    set_defaults(options);
}
