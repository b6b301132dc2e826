/* SPDX-License-Identifier: MIT */
/* What the subcommands of the qkv tool share. */
#ifndef QKV_TOOL_TOOL_H
#define QKV_TOOL_TOOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <qkv/qkv.h>

#include "npy.h"

/* Exit codes. */
enum {
    TOOL_OK = 0,
    TOOL_MISMATCH = 1, /* a result is not within its tolerance */
    TOOL_ERROR = 2     /* bad options, an unsuitable file, out of memory, ... */
};

/* One subcommand each: argv[0] is its name. They return an exit code. */
int tool_attend(int argc, char **argv);
int tool_layer(int argc, char **argv);
int tool_info(int argc, char **argv);

/* Prints "qkv: ..." as one line on stderr and returns TOOL_ERROR. */
#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
int tool_error(const char *format, ...);

/*
 * One option. With 'value' it takes an argument ("--scale 2", "--scale=2" or
 * "-o file"), with 'flag' it takes none.
 */
struct tool_option {
    const char *name; /* without its dashes; one letter: "-o" */
    const char **value;
    bool *flag;
};

/*
 * Reads the arguments after argv[0]. Exactly 'operand_count' operands are
 * wanted. On an error it prints one line and 'usage', and returns TOOL_ERROR.
 */
int tool_options(int argc, char **argv, const struct tool_option *options, size_t option_count,
                 const char **operands, int operand_count, const char *usage);

/* The numbers of options; NULL leaves '*number' as it is. 0 or TOOL_ERROR. */
int tool_parse_float(const char *option, const char *text, float *number);
int tool_parse_count(const char *option, const char *text, int64_t least, int64_t most,
                     int64_t *number);

/* Selects the ISA; NULL keeps the automatic choice. 0 or TOOL_ERROR. */
int tool_select_isa(const char *name);

/* npy_load() and npy_save() with a message. 0 or TOOL_ERROR. */
int tool_load(const char *path, struct npy *array);
int tool_save(const char *path, const float *data, int ndim, const int64_t *shape);

/*
 * malloc(count * size) with the product checked, for count >= 0; never
 * returns NULL for an empty array. Prints a message where it fails.
 */
void *tool_alloc(int64_t count, size_t size);

/* Scratch memory of at least 'size' bytes, aligned for qkv; free() it. */
void *tool_scratch(size_t size);

double tool_seconds(void);
double tool_median(double *values, int64_t count); /* sorts them */

#endif
