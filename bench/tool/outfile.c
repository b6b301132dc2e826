/* SPDX-License-Identifier: MIT */
#include "outfile.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char *join(const char *first, const char *second)
{
    char *joined = malloc(strlen(first) + strlen(second) + 1);
    if (joined)
        strcat(strcpy(joined, first), second);
    return joined;
}

static int open_temporary(struct outfile *file)
{
    file->temporary = join(file->path, ".XXXXXX");
    if (!file->temporary)
        return -1;
    const int descriptor = mkstemp(file->temporary);
    if (descriptor < 0) {
        free(file->temporary);
        file->temporary = NULL;
        return -1;
    }
    /* mkstemp() makes the file private; give it the mode of any new file. */
    const mode_t mask = umask(0);
    (void)umask(mask);
    (void)fchmod(descriptor, 0666 & ~mask);
    file->stream = fdopen(descriptor, "wb");
    if (!file->stream) {
        const int reason = errno;
        (void)close(descriptor);
        errno = reason;
        return -1;
    }
    return 0;
}

int outfile_open(struct outfile *file, const char *path)
{
    struct stat status;
    *file = (struct outfile){0};
    const int exists = stat(path, &status) == 0;
    if (exists && S_ISDIR(status.st_mode)) {
        errno = EISDIR;
        return -1;
    }
    if (exists && !S_ISREG(status.st_mode)) {
        file->stream = fopen(path, "wb");
        return file->stream ? 0 : -1;
    }
    /* Renaming onto a symbolic link would replace the link. */
    file->path = exists ? realpath(path, NULL) : join(path, "");
    return file->path ? open_temporary(file) : -1;
}

int outfile_commit(struct outfile *file)
{
    /* fclose() writes what is still buffered: a full disk may show only here. */
    const int failed = ferror(file->stream);
    FILE *stream = file->stream;
    file->stream = NULL;
    if (fclose(stream) || failed) {
        if (failed)
            errno = EIO;
        return -1;
    }
    if (file->temporary && rename(file->temporary, file->path))
        return -1;
    free(file->temporary);
    free(file->path);
    *file = (struct outfile){0};
    return 0;
}

void outfile_abandon(struct outfile *file)
{
    if (file->stream)
        (void)fclose(file->stream);
    if (file->temporary)
        (void)unlink(file->temporary);
    free(file->temporary);
    free(file->path);
    *file = (struct outfile){0};
}
