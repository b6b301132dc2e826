/* SPDX-License-Identifier: MIT */
/* The command-line tool. */
#include <stdio.h>
#include <string.h>

#include "tool.h"

static const char usage[] =
    "usage: qkv COMMAND [ARGUMENTS]\n"
    "\n"
    "Self-attention on the CPU.\n"
    "\n"
    "  qkv attend   softmax(scale * Q K^T) V on .npy files\n"
    "  qkv layer    run a real layer of a language model, compare it with PyTorch's\n"
    "               results and show which token attends to which\n"
    "  qkv info     the CPU, and the instruction sets that the library can use\n"
    "\n"
    "  qkv COMMAND --help   explains a command\n"
    "  qkv --version        prints the version\n"
    "\n"
    "Exit codes: 0 success, 1 a result is not within its tolerance, 2 an error.\n";

static int flush(int result)
{
    /* Output that could not be written (a full disk) is an error too. */
    if (fflush(stdout) || ferror(stdout)) {
        perror("qkv: standard output");
        return TOOL_ERROR;
    }
    return result;
}

static int print_version(void)
{
    const int version = qkv_version();
    printf("qkv %d.%d.%d\n", version / 10000, version / 100 % 100, version % 100);
    return TOOL_OK;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(int argc, char **argv);
    } commands[] = {{"attend", tool_attend}, {"layer", tool_layer}, {"info", tool_info}};

    if (argc < 2 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        fputs(usage, stdout);
        return flush(TOOL_OK);
    }
    if (strcmp(argv[1], "--version") == 0)
        return flush(print_version());
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (strcmp(argv[1], commands[i].name) == 0)
            return flush(commands[i].run(argc - 1, argv + 1));
    fprintf(stderr, "qkv: there is no command '%s'; qkv --help lists them\n", argv[1]);
    return TOOL_ERROR;
}
