/* SPDX-License-Identifier: MIT */
#include <qkv/qkv.h>

const char *qkv_strerror(qkv_status status)
{
    switch (status) {
    case QKV_OK:
        return "success";
    case QKV_E_NULL:
        return "a required pointer is NULL";
    case QKV_E_SIZE:
        return "the descriptor's size is not one that this version knows";
    case QKV_E_FLAGS:
        return "an unknown flag, or flags or fields that exclude each other";
    case QKV_E_SHAPE:
        return "a size is negative or impossible, or starts or lengths leave the rows there are";
    case QKV_E_STRIDE:
        return "a stride is negative, or makes the rows of an output overlap";
    case QKV_E_DTYPE:
        return "unknown element type";
    case QKV_E_ALIGN:
        return "a pointer is not aligned to its element";
    case QKV_E_OVERLAP:
        return "an output overlaps an input or another output";
    case QKV_E_OVERFLOW:
        return "a size in bytes does not fit the address space";
    case QKV_E_SCRATCH:
        return "scratch memory is missing, too small or misaligned";
    case QKV_E_VALUE:
        return "a scale, softcap or stage of weights is out of range";
    case QKV_E_ISA:
        return "no such instruction set, or this machine does not support it";
    case QKV_E_INDEX:
        return "a task, worker, list index or page is out of range";
    case QKV_E_UNSUPPORTED:
        return "not offered by this version";
    case QKV_E_SYSTEM:
        return "the system has no memory or no thread left";
    default:
        return "unknown status";
    }
}

int qkv_version(void)
{
    return QKV_VERSION;
}
