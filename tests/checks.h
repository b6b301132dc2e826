/* SPDX-License-Identifier: MIT */
/*
 * One check for every kernel of kernels.def: check_<op>() takes the kernel
 * of one ISA through all its shapes. A kernel that is listed without one
 * does not link.
 */
#ifndef TEST_CHECKS_H
#define TEST_CHECKS_H

#include "harness.h"
#include "oracle/oracle.h"

#define QKV_KERNEL(op, ...) void check_##op(const test_isa *isa);
#include "kernels.def"
#undef QKV_KERNEL

/* Lengths from 0 up to this meet every remainder twice, in every ISA. */
enum { LENGTHS = 131 };

#endif
