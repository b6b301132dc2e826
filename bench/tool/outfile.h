/* SPDX-License-Identifier: MIT */
/*
 * A file that appears under its name only when it is complete: it is written
 * beside it under a temporary name and renamed at the end. What is not a
 * regular file (a terminal, a pipe, /dev/null) is written directly.
 */
#ifndef QKV_TOOL_OUTFILE_H
#define QKV_TOOL_OUTFILE_H

#include <stdio.h>

struct outfile {
    FILE *stream;
    char *path;      /* the final name, symbolic links followed */
    char *temporary; /* NULL: written directly */
};

/* Both return 0, or -1 with the reason in errno. */
int outfile_open(struct outfile *file, const char *path);
int outfile_commit(struct outfile *file);

/* Drops what a failed open or commit, or a decision not to commit, leaves. */
void outfile_abandon(struct outfile *file);

#endif
