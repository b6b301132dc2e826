/* SPDX-License-Identifier: MIT */
/*
 * The watch of abi.h sees what it is there to see: functions that break the
 * calling convention in one way each, in assembler, as no compiler would
 * write them.
 */
#include "abi.h"

#include <string.h>

typedef struct culprit {
    void (*function)(void);
    const char *breaks;
} culprit;

#define FUNCTION(name, body)                                                                       \
    extern void name(void) __attribute__((visibility("hidden")));                                  \
    __asm__(".text\n.globl " #name "\n.hidden " #name "\n" #name ":\n" body "    ret\n");

#if defined(__ELF__) && defined(__x86_64__) && defined(__LP64__)

FUNCTION(good, "    xorl %eax, %eax\n")
FUNCTION(bad_rbx, "    incq %rbx\n")
FUNCTION(bad_rbp, "    xorl %ebp, %ebp\n")
FUNCTION(bad_r12, "    movl %r12d, %r12d\n")
FUNCTION(bad_r13, "    notq %r13\n")
FUNCTION(bad_r14, "    shlq $1, %r14\n")
FUNCTION(bad_r15, "    decq %r15\n")
FUNCTION(bad_stack, "    popq %rax\n    pushq %rax\n    pushq %rax\n")
FUNCTION(bad_direction, "    std\n")
FUNCTION(bad_mxcsr, "    stmxcsr -8(%rsp)\n    orl $0x8000, -8(%rsp)\n    ldmxcsr -8(%rsp)\n")
FUNCTION(bad_control_word, "    fnstcw -8(%rsp)\n    xorw $0x0300, -8(%rsp)\n    fldcw -8(%rsp)\n")
FUNCTION(bad_mmx, "    pxor %mm0, %mm0\n")

static const culprit culprits[] = {
    {good, ""},
    {bad_rbx, "does not keep rbx"},
    {bad_rbp, "does not keep rbp"},
    {bad_r12, "does not keep r12"},
    {bad_r13, "does not keep r13"},
    {bad_r14, "does not keep r14"},
    {bad_r15, "does not keep r15"},
    {bad_stack, "returns with another stack pointer"},
    {bad_direction, "leaves the direction flag set"},
    {bad_mxcsr, "changes the floating-point control modes"},
    {bad_control_word, "changes the x87 control word"},
    {bad_mmx, "leaves x87 registers in use"},
};

/* Dirty, and dirty with a zero in it, which only the CPU itself can tell. */
FUNCTION(bad_upper, "    vcmpps $15, %ymm5, %ymm5, %ymm5\n")
FUNCTION(bad_upper_zero, "    vcmpps $15, %ymm5, %ymm5, %ymm5\n    vxorps %ymm5, %ymm5, %ymm5\n")
FUNCTION(good_upper, "    vcmpps $15, %ymm5, %ymm5, %ymm5\n    vzeroupper\n")

Test(abi, upper_vector_state)
{
    if (qkv_isas_detect().missing[QKV_ISA_avx2]) {
        skip_test("calling convention: no AVX2 here");
        return;
    }
    cr_assert_str_eq(abi_verdict(good_upper), "");
    cr_assert_str_eq(abi_verdict(bad_upper), "leaves the upper half of ymm5 dirty");
    /* A CPU need not track it: then the verdict is empty. */
    const char *zero = abi_verdict(bad_upper_zero);
    cr_assert(!*zero || strcmp(zero, "returns without VZEROUPPER") == 0);
    cr_log_info("this CPU %s the upper vector state", *zero ? "tells" : "does not tell");
}

#elif defined(__ELF__) && defined(__aarch64__)

FUNCTION(good, "    mov x0, #0\n")
FUNCTION(bad_x19, "    add x19, x19, #1\n")
FUNCTION(bad_x20, "    mov x20, xzr\n")
FUNCTION(bad_x24, "    mov w24, w24\n")
FUNCTION(bad_x28, "    mvn x28, x28\n")
FUNCTION(bad_x29, "    mov x29, sp\n")
FUNCTION(bad_d8, "    movi d8, #0\n")
FUNCTION(bad_d11, "    fmov s11, #1.0\n")
FUNCTION(bad_d15, "    movi v15.4s, #1\n")
FUNCTION(bad_stack, "    sub sp, sp, #16\n")
FUNCTION(bad_fpcr, "    mrs x9, fpcr\n    orr x9, x9, #0x1000000\n    msr fpcr, x9\n")

static const culprit culprits[] = {
    {good, ""},
    {bad_x19, "does not keep x19"},
    {bad_x20, "does not keep x20"},
    {bad_x24, "does not keep x24"},
    {bad_x28, "does not keep x28"},
    {bad_x29, "does not keep x29"},
    {bad_d8, "does not keep d8"},
    {bad_d11, "does not keep d11"},
    {bad_d15, "does not keep d15"},
    {bad_stack, "returns with another stack pointer"},
    {bad_fpcr, "changes the floating-point control modes"},
};

#else

static void good(void)
{
}

static const culprit culprits[] = {{good, ""}};

#endif

Test(abi, breaches_are_seen)
{
    if (!abi_can_watch()) {
        skip_test("calling convention: no trampoline for this platform");
        return;
    }
    for (size_t i = 0; i < sizeof culprits / sizeof *culprits; i++) {
        const char *verdict = abi_verdict(culprits[i].function);
        if (strcmp(verdict, culprits[i].breaks) != 0)
            fail_with("function %zu: \"%s\", expected \"%s\"", i, verdict, culprits[i].breaks);
    }
}
