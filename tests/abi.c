/* SPDX-License-Identifier: MIT */
/*
 * The trampoline of abi.h. It knows no kernel's type: a thunk for each kernel
 * of kernels.def puts the kernel's number into a scratch register and jumps
 * to abi_call, which leaves every argument where it is, in registers or on
 * the stack, and saves what it needs in 'abi_state', because neither the
 * stack pointer nor a register can be trusted after a call that may have
 * broken them.
 */
#include "abi.h"

#include <stdio.h>
#include <string.h>

#if defined(__ELF__) && defined(__x86_64__) && defined(__LP64__)
#define ABI_X86_64 1
#include <cpuid.h>
#elif defined(__ELF__) && defined(__aarch64__)
#define ABI_AARCH64 1
#endif

#if defined(ABI_X86_64) || defined(ABI_AARCH64)

enum { PATTERNS = 11, FP_PATTERNS = 8, WIDE = 16 };

/* The assembler knows these offsets: they are asserted below. */
typedef struct abi_record {
    uint64_t before[PATTERNS];       /* 0: callee-saved registers as the kernel finds them */
    uint64_t after[PATTERNS];        /* 88: and as it leaves them */
    uint64_t saved[PATTERNS + 1];    /* 176: the caller's, and the return address */
    uint64_t fp_before[FP_PATTERNS]; /* 272: AArch64: d8 to d15 */
    uint64_t fp_after[FP_PATTERNS];  /* 336 */
    uint64_t fp_saved[FP_PATTERNS];  /* 400 */
    uint64_t sp;                     /* 464: the caller's stack pointer */
    uint64_t sp_before, sp_after;    /* 472, 480: the kernel's */
    uint64_t offset;                 /* 488: 0, 16, 32 or 48 below a multiple of 64 */
    uint64_t control;                /* 496: MXCSR or FPCR of the caller */
    uint64_t control_in;             /* 504: of the kernel */
    uint64_t control_after;          /* 512 */
    uint64_t has_avx, has_xinuse;    /* 520, 528 */
    uint64_t xinuse;                 /* 536: XGETBV with ECX 1, after */
    uint64_t flags;                  /* 544: RFLAGS, after */
    uint64_t result[2];              /* 552: integer results */
    uint64_t spare;                  /* 568 */
    uint64_t vector_result[8];       /* 576: XMM0 and XMM1, or V0 to V3 */
    uint64_t rubbish[2];             /* 640 */
    uint64_t upper[WIDE][2];         /* 656: upper halves of YMM0 to YMM15, after */
    uint32_t x87[8];                 /* 912: FNSTENV, after */
    uint64_t x87_before;             /* 944: the x87 control word */
} abi_record;

_Static_assert(offsetof(abi_record, before) == 0, "");
_Static_assert(offsetof(abi_record, after) == 88, "");
_Static_assert(offsetof(abi_record, saved) == 176, "");
_Static_assert(offsetof(abi_record, fp_before) == 272, "");
_Static_assert(offsetof(abi_record, fp_after) == 336, "");
_Static_assert(offsetof(abi_record, fp_saved) == 400, "");
_Static_assert(offsetof(abi_record, sp) == 464, "");
_Static_assert(offsetof(abi_record, sp_after) == 480, "");
_Static_assert(offsetof(abi_record, offset) == 488, "");
_Static_assert(offsetof(abi_record, control_in) == 504, "");
_Static_assert(offsetof(abi_record, has_avx) == 520, "");
_Static_assert(offsetof(abi_record, xinuse) == 536, "");
_Static_assert(offsetof(abi_record, result) == 552, "");
_Static_assert(offsetof(abi_record, vector_result) == 576, "");
_Static_assert(offsetof(abi_record, rubbish) == 640, "");
_Static_assert(offsetof(abi_record, upper) == 656, "");
_Static_assert(offsetof(abi_record, x87) == 912, "");
_Static_assert(offsetof(abi_record, x87_before) == 944, "");

/* Seen by the assembler alone: not to be dropped or renamed by the compiler. */
#if defined(__has_attribute)
#if __has_attribute(externally_visible)
#define ASM_SEEN __attribute__((used, visibility("hidden"), externally_visible))
#endif
#endif
#ifndef ASM_SEEN
#define ASM_SEEN __attribute__((used, visibility("hidden")))
#endif

ASM_SEEN abi_record abi_state = {
    .rubbish = {UINT64_C(0xffa5deadffa5dead), UINT64_C(0xffa5deadffa5dead)}};

void abi_verify(void);

/* A thunk and the kernel that it leads to; "abi_self" is for tests of this file. */
#define QKV_KERNEL(op, ...)                                                                        \
    extern qkv_##op##_fn abi_thunk_##op __attribute__((visibility("hidden")));                     \
    ASM_SEEN qkv_##op##_fn *abi_target_##op;
#include "kernels.def"
#undef QKV_KERNEL

extern void abi_thunk_self(void) __attribute__((visibility("hidden")));
ASM_SEEN void (*abi_target_self)(void);

#endif

/* --------------------------------------------------------- the trampoline */

#ifdef ABI_X86_64

#define THUNK(op)                                                                                  \
    __asm__(".text\n.globl abi_thunk_" op "\n.hidden abi_thunk_" op "\n"                           \
            ".type abi_thunk_" op ", @function\nabi_thunk_" op ":\n"                               \
            "    leaq abi_target_" op "(%rip), %r11\n"                                             \
            "    jmp abi_call\n");

__asm__(".text\n"
        ".globl abi_call\n.hidden abi_call\n.type abi_call, @function\n"
        "abi_call:\n"
        "    leaq abi_state(%rip), %r10\n"
        "    movq %rbx, 176(%r10)\n"
        "    movq %rbp, 184(%r10)\n"
        "    movq %r12, 192(%r10)\n"
        "    movq %r13, 200(%r10)\n"
        "    movq %r14, 208(%r10)\n"
        "    movq %r15, 216(%r10)\n"
        "    movq %rsp, 464(%r10)\n"
        "    stmxcsr 496(%r10)\n"
        "    fnstcw 944(%r10)\n"
        /* The kernel's stack, with copies of what may be stack arguments. */
        "    movq %rsp, %rax\n"
        "    andq $-64, %rsp\n"
        "    subq 488(%r10), %rsp\n"
        "    pushq 64(%rax)\n"
        "    pushq 56(%rax)\n"
        "    pushq 48(%rax)\n"
        "    pushq 40(%rax)\n"
        "    pushq 32(%rax)\n"
        "    pushq 24(%rax)\n"
        "    pushq 16(%rax)\n"
        "    pushq 8(%rax)\n"
        "    movq %rsp, 472(%r10)\n"
        /* Rubbish below the stack, in upper lanes and in free registers. */
        "    movq %rdi, %rbx\n"
        "    movq %rcx, %r12\n"
        "    leaq -2048(%rsp), %rdi\n"
        "    movl $256, %ecx\n"
        "    movq 640(%r10), %rax\n"
        "    rep stosq\n"
        "    movq %rbx, %rdi\n"
        "    movq %r12, %rcx\n"
        "    cmpl $0, 520(%r10)\n"
        "    je 1f\n"
        "    vzeroupper\n"
        "1:\n"
        "    movups 640(%r10), %xmm8\n"
        "    movaps %xmm8, %xmm9\n"
        "    movaps %xmm8, %xmm10\n"
        "    movaps %xmm8, %xmm11\n"
        "    movaps %xmm8, %xmm12\n"
        "    movaps %xmm8, %xmm13\n"
        "    movaps %xmm8, %xmm14\n"
        "    movaps %xmm8, %xmm15\n"
        "    movsd %xmm0, %xmm8\n"
        "    movaps %xmm8, %xmm0\n"
        "    movaps %xmm9, %xmm8\n"
        "    movsd %xmm1, %xmm8\n"
        "    movaps %xmm8, %xmm1\n"
        "    movaps %xmm9, %xmm8\n"
        "    movq 0(%r10), %rbx\n"
        "    movq 8(%r10), %rbp\n"
        "    movq 16(%r10), %r12\n"
        "    movq 24(%r10), %r13\n"
        "    movq 32(%r10), %r14\n"
        "    movq 40(%r10), %r15\n"
        "    ldmxcsr 504(%r10)\n"
        "    call *(%r11)\n"
        "    leaq abi_state(%rip), %r10\n"
        "    stmxcsr 512(%r10)\n"
        "    movq %rax, 552(%r10)\n"
        "    movq %rdx, 560(%r10)\n"
        "    movups %xmm0, 576(%r10)\n"
        "    movups %xmm1, 592(%r10)\n"
        "    movq %rbx, 88(%r10)\n"
        "    movq %rbp, 96(%r10)\n"
        "    movq %r12, 104(%r10)\n"
        "    movq %r13, 112(%r10)\n"
        "    movq %r14, 120(%r10)\n"
        "    movq %r15, 128(%r10)\n"
        "    movq %rsp, 480(%r10)\n"
        "    movq 464(%r10), %rsp\n"
        "    pushfq\n"
        "    popq 544(%r10)\n"
        "    cld\n"
        "    fnstenv 912(%r10)\n"
        "    fldenv 912(%r10)\n"
        "    cmpl $0, 528(%r10)\n"
        "    je 2f\n"
        "    movl $1, %ecx\n"
        "    xgetbv\n"
        "    movl %eax, 536(%r10)\n"
        "2:\n"
        "    cmpl $0, 520(%r10)\n"
        "    je 3f\n"
        "    vextractf128 $1, %ymm0, 656(%r10)\n"
        "    vextractf128 $1, %ymm1, 672(%r10)\n"
        "    vextractf128 $1, %ymm2, 688(%r10)\n"
        "    vextractf128 $1, %ymm3, 704(%r10)\n"
        "    vextractf128 $1, %ymm4, 720(%r10)\n"
        "    vextractf128 $1, %ymm5, 736(%r10)\n"
        "    vextractf128 $1, %ymm6, 752(%r10)\n"
        "    vextractf128 $1, %ymm7, 768(%r10)\n"
        "    vextractf128 $1, %ymm8, 784(%r10)\n"
        "    vextractf128 $1, %ymm9, 800(%r10)\n"
        "    vextractf128 $1, %ymm10, 816(%r10)\n"
        "    vextractf128 $1, %ymm11, 832(%r10)\n"
        "    vextractf128 $1, %ymm12, 848(%r10)\n"
        "    vextractf128 $1, %ymm13, 864(%r10)\n"
        "    vextractf128 $1, %ymm14, 880(%r10)\n"
        "    vextractf128 $1, %ymm15, 896(%r10)\n"
        "    vzeroupper\n"
        "3:\n"
        /* The caller's modes, with the status flags that the kernel raised. */
        "    movl 512(%r10), %eax\n"
        "    andl $0x3f, %eax\n"
        "    orl 496(%r10), %eax\n"
        "    movl %eax, 568(%r10)\n"
        "    ldmxcsr 568(%r10)\n"
        "    movq 176(%r10), %rbx\n"
        "    movq 184(%r10), %rbp\n"
        "    movq 192(%r10), %r12\n"
        "    movq 200(%r10), %r13\n"
        "    movq 208(%r10), %r14\n"
        "    movq 216(%r10), %r15\n"
        "    subq $8, %rsp\n"
        "    call abi_verify\n"
        "    addq $8, %rsp\n"
        "    leaq abi_state(%rip), %r10\n"
        "    movq 552(%r10), %rax\n"
        "    movq 560(%r10), %rdx\n"
        "    movups 576(%r10), %xmm0\n"
        "    movups 592(%r10), %xmm1\n"
        "    ret\n"
        ".size abi_call, .-abi_call\n");

static const char *const callee_saved[] = {"rbx", "rbp", "r12", "r13", "r14", "r15"};
enum { CALLEE_SAVED = 6, FP_CALLEE_SAVED = 0 };
enum { MXCSR_STATUS = 0x3f, MXCSR_FTZ = 0x8000, MXCSR_DAZ = 0x0040, MXCSR_UP = 0x4000 };
enum { RFLAGS_DF = 1 << 10, XINUSE_YMM = 1 << 2, XINUSE_ZMM = 1 << 6 };

static uint64_t control_of(abi_fp_mode mode)
{
    uint32_t mxcsr;
    __asm__ volatile("stmxcsr %0" : "=m"(mxcsr));
    mxcsr &= ~(uint32_t)MXCSR_STATUS;
    return mode == ABI_FLUSH    ? mxcsr | MXCSR_FTZ | MXCSR_DAZ
           : mode == ABI_UPWARD ? mxcsr | MXCSR_UP
                                : mxcsr;
}

static bool control_kept(void)
{
    return ((abi_state.control_in ^ abi_state.control_after) & ~(uint64_t)MXCSR_STATUS) == 0;
}

/*
 * Whether the CPU tells that the upper halves are in their initial state: a
 * processor may say so of XMM state that it does not track, so its word
 * counts only if it calls the state clean right after VZEROUPPER.
 */
static bool tracks_upper_state(void)
{
    uint32_t eax, ebx, ecx, edx, high;
    if (!__get_cpuid_count(0xd, 1, &eax, &ebx, &ecx, &edx) || !(eax & 1 << 2))
        return false;
    __asm__ volatile("vzeroupper\n\txgetbv" : "=a"(eax), "=d"(high) : "c"(1));
    return !(eax & (XINUSE_YMM | XINUSE_ZMM));
}

static void find_machine(void)
{
    abi_state.has_avx = qkv_isas_detect().missing[QKV_ISA_avx2] == NULL;
    abi_state.has_xinuse = abi_state.has_avx && tracks_upper_state();
}

static bool watch_upper;

static const char *broken_by_platform(void)
{
    static char text[80];
    if (abi_state.flags & RFLAGS_DF)
        return "leaves the direction flag set";
    if ((abi_state.x87[0] & 0xffff) != (abi_state.x87_before & 0xffff))
        return "changes the x87 control word";
    if ((abi_state.x87[2] & 0xffff) != 0xffff && watch_upper)
        return "leaves x87 registers in use";
    for (int i = 0; i < WIDE && abi_state.has_avx && watch_upper; i++) {
        if (abi_state.upper[i][0] | abi_state.upper[i][1]) {
            snprintf(text, sizeof text, "leaves the upper half of ymm%d dirty", i);
            return text;
        }
    }
    if (abi_state.has_xinuse && watch_upper && abi_state.xinuse & (XINUSE_YMM | XINUSE_ZMM))
        return "returns without VZEROUPPER";
    return NULL;
}

#elif defined(ABI_AARCH64)

#define THUNK(op)                                                                                  \
    __asm__(".text\n.globl abi_thunk_" op "\n.hidden abi_thunk_" op "\n"                           \
            ".type abi_thunk_" op ", %function\nabi_thunk_" op ":\n"                               \
            "    adrp x16, abi_target_" op "\n"                                                    \
            "    add x16, x16, :lo12:abi_target_" op "\n"                                          \
            "    b abi_call\n");

__asm__(".text\n"
        ".globl abi_call\n.hidden abi_call\n.type abi_call, %function\n"
        "abi_call:\n"
        "    adrp x17, abi_state\n"
        "    add x17, x17, :lo12:abi_state\n"
        "    add x9, x17, #176\n"
        "    stp x19, x20, [x9]\n"
        "    stp x21, x22, [x9, #16]\n"
        "    stp x23, x24, [x9, #32]\n"
        "    stp x25, x26, [x9, #48]\n"
        "    stp x27, x28, [x9, #64]\n"
        "    stp x29, x30, [x9, #80]\n"
        "    add x9, x17, #400\n"
        "    stp d8, d9, [x9]\n"
        "    stp d10, d11, [x9, #16]\n"
        "    stp d12, d13, [x9, #32]\n"
        "    stp d14, d15, [x9, #48]\n"
        "    mov x9, sp\n"
        "    str x9, [x17, #464]\n"
        "    mrs x10, fpcr\n"
        "    str x10, [x17, #496]\n"
        /* The kernel's stack, with copies of what may be stack arguments. */
        "    and x11, x9, #-64\n"
        "    ldr x10, [x17, #488]\n"
        "    sub x11, x11, x10\n"
        "    sub x11, x11, #64\n"
        "    ldp x12, x13, [x9]\n"
        "    ldp x14, x15, [x9, #16]\n"
        "    mov sp, x11\n"
        "    stp x12, x13, [sp]\n"
        "    stp x14, x15, [sp, #16]\n"
        "    ldp x12, x13, [x9, #32]\n"
        "    ldp x14, x15, [x9, #48]\n"
        "    stp x12, x13, [sp, #32]\n"
        "    stp x14, x15, [sp, #48]\n"
        "    str x11, [x17, #472]\n"
        /* Rubbish below the stack and in free registers. */
        "    ldr x12, [x17, #640]\n"
        "    sub x13, x11, #2048\n"
        "1:  stp x12, x12, [x13], #16\n"
        "    cmp x13, x11\n"
        "    b.ne 1b\n"
        "    dup v16.2d, x12\n"
        "    mov v17.16b, v16.16b\n"
        "    mov v18.16b, v16.16b\n"
        "    mov v19.16b, v16.16b\n"
        "    mov v20.16b, v16.16b\n"
        "    mov v21.16b, v16.16b\n"
        "    mov v22.16b, v16.16b\n"
        "    mov v23.16b, v16.16b\n"
        "    mov v24.16b, v16.16b\n"
        "    mov v25.16b, v16.16b\n"
        "    mov v26.16b, v16.16b\n"
        "    mov v27.16b, v16.16b\n"
        "    mov v28.16b, v16.16b\n"
        "    mov v29.16b, v16.16b\n"
        "    mov v30.16b, v16.16b\n"
        "    mov v31.16b, v16.16b\n"
        "    mov v0.d[1], x12\n"
        "    mov v1.d[1], x12\n"
        "    mov v2.d[1], x12\n"
        "    mov v3.d[1], x12\n"
        "    add x9, x17, #0\n"
        "    ldp x19, x20, [x9]\n"
        "    ldp x21, x22, [x9, #16]\n"
        "    ldp x23, x24, [x9, #32]\n"
        "    ldp x25, x26, [x9, #48]\n"
        "    ldp x27, x28, [x9, #64]\n"
        "    ldr x29, [x9, #80]\n"
        "    add x9, x17, #272\n"
        "    ldp d8, d9, [x9]\n"
        "    ldp d10, d11, [x9, #16]\n"
        "    ldp d12, d13, [x9, #32]\n"
        "    ldp d14, d15, [x9, #48]\n"
        "    ldr x10, [x17, #504]\n"
        "    msr fpcr, x10\n"
        "    ldr x16, [x16]\n"
        "    blr x16\n"
        "    adrp x17, abi_state\n"
        "    add x17, x17, :lo12:abi_state\n"
        "    mrs x9, fpcr\n"
        "    str x9, [x17, #512]\n"
        "    add x9, x17, #552\n"
        "    stp x0, x1, [x9]\n"
        "    add x9, x17, #576\n"
        "    stp q0, q1, [x9]\n"
        "    stp q2, q3, [x9, #32]\n"
        "    add x9, x17, #88\n"
        "    stp x19, x20, [x9]\n"
        "    stp x21, x22, [x9, #16]\n"
        "    stp x23, x24, [x9, #32]\n"
        "    stp x25, x26, [x9, #48]\n"
        "    stp x27, x28, [x9, #64]\n"
        "    str x29, [x9, #80]\n"
        "    add x9, x17, #336\n"
        "    stp d8, d9, [x9]\n"
        "    stp d10, d11, [x9, #16]\n"
        "    stp d12, d13, [x9, #32]\n"
        "    stp d14, d15, [x9, #48]\n"
        "    mov x9, sp\n"
        "    str x9, [x17, #480]\n"
        "    ldr x9, [x17, #464]\n"
        "    mov sp, x9\n"
        "    ldr x9, [x17, #496]\n"
        "    msr fpcr, x9\n"
        "    add x9, x17, #176\n"
        "    ldp x19, x20, [x9]\n"
        "    ldp x21, x22, [x9, #16]\n"
        "    ldp x23, x24, [x9, #32]\n"
        "    ldp x25, x26, [x9, #48]\n"
        "    ldp x27, x28, [x9, #64]\n"
        "    ldr x29, [x9, #80]\n"
        "    add x9, x17, #400\n"
        "    ldp d8, d9, [x9]\n"
        "    ldp d10, d11, [x9, #16]\n"
        "    ldp d12, d13, [x9, #32]\n"
        "    ldp d14, d15, [x9, #48]\n"
        "    bl abi_verify\n"
        "    adrp x17, abi_state\n"
        "    add x17, x17, :lo12:abi_state\n"
        "    add x9, x17, #552\n"
        "    ldp x0, x1, [x9]\n"
        "    add x9, x17, #576\n"
        "    ldp q0, q1, [x9]\n"
        "    ldp q2, q3, [x9, #32]\n"
        "    ldr x30, [x17, #264]\n"
        "    ret\n"
        ".size abi_call, .-abi_call\n");

static const char *const callee_saved[] = {"x19", "x20", "x21", "x22", "x23", "x24",
                                           "x25", "x26", "x27", "x28", "x29"};
enum { CALLEE_SAVED = 11, FP_CALLEE_SAVED = 8 };
enum { FPCR_FZ = 1 << 24, FPCR_UP = 1 << 22 };

static uint64_t control_of(abi_fp_mode mode)
{
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    return mode == ABI_FLUSH ? fpcr | FPCR_FZ : mode == ABI_UPWARD ? fpcr | FPCR_UP : fpcr;
}

static bool control_kept(void)
{
    return abi_state.control_in == abi_state.control_after;
}

static void find_machine(void)
{
}

static bool watch_upper;

static const char *broken_by_platform(void)
{
    (void)watch_upper; /* AArch64 has none */
    return NULL;
}

#endif

/* --------------------------------------------------------------- the judge */

#if defined(ABI_X86_64) || defined(ABI_AARCH64)

#define QKV_KERNEL(op, ...) THUNK(#op)
#include "kernels.def"
#undef QKV_KERNEL
THUNK("self")

/* Where the self-tests want the verdict; else the test fails with it. */
static char *verdict_to;
static size_t verdict_size;

static void set_call(abi_fp_mode mode, uint64_t offset)
{
    for (unsigned i = 0; i < PATTERNS; i++)
        abi_state.before[i] = UINT64_C(0x5bd1e995a5000001) * (i + 3);
    for (unsigned i = 0; i < FP_PATTERNS; i++)
        abi_state.fp_before[i] = UINT64_C(0x7ff4a5a500000000) + i;
    abi_state.control_in = control_of(mode);
    abi_state.offset = offset;
}

static const char *broken(void)
{
    static char text[80];
    for (int i = 0; i < CALLEE_SAVED; i++) {
        if (abi_state.before[i] != abi_state.after[i]) {
            snprintf(text, sizeof text, "does not keep %s", callee_saved[i]);
            return text;
        }
    }
    for (int i = 0; i < FP_CALLEE_SAVED; i++) {
        if (abi_state.fp_before[i] != abi_state.fp_after[i]) {
            snprintf(text, sizeof text, "does not keep d%d", i + 8);
            return text;
        }
    }
    if (abi_state.sp_before != abi_state.sp_after)
        return "returns with another stack pointer";
    if (!control_kept())
        return "changes the floating-point control modes";
    return broken_by_platform();
}

ASM_SEEN void abi_verify(void)
{
    const char *text = broken();
    abi_state.offset = (abi_state.offset + 16) % 64;
    if (verdict_to)
        snprintf(verdict_to, verdict_size, "%s", text ? text : "");
    else if (text)
        fail_with("the kernel %s", text);
}

const qkv_kernels *abi_watched(const qkv_kernels *table, bool upper_state)
{
    static qkv_kernels watched;
    find_machine();
    watch_upper = upper_state;
    set_call(ABI_DEFAULT, 0);
    watched = *table;
#define QKV_KERNEL(op, ...)                                                                        \
    abi_target_##op = table->op;                                                                   \
    watched.op = abi_thunk_##op;
#include "kernels.def"
#undef QKV_KERNEL
    return &watched;
}

const char *abi_verdict(void (*function)(void))
{
    static char text[80];
    find_machine();
    watch_upper = true;
    set_call(ABI_DEFAULT, 0);
    abi_target_self = function;
    verdict_to = text;
    verdict_size = sizeof text;
    abi_thunk_self();
    verdict_to = NULL;
    return text;
}

bool abi_can_watch(void)
{
    return true;
}

void abi_mode(abi_fp_mode mode)
{
    abi_state.control_in = control_of(mode);
}

#else

const qkv_kernels *abi_watched(const qkv_kernels *table, bool upper_state)
{
    (void)upper_state;
    return table;
}

const char *abi_verdict(void (*function)(void))
{
    (void)function;
    return "";
}

bool abi_can_watch(void)
{
    return false;
}

void abi_mode(abi_fp_mode mode)
{
    (void)mode;
}

#endif
