# SPDX-License-Identifier: MIT
"""The part of the C API that attention needs, through ctypes."""
import ctypes as c

F32, F16, BF16, BOOL = 0, 1, 2, 8
CAUSAL, SCALE_SET, WINDOW = 1, 2, 8
STRIDED = 1
SOFTMAX, SCALED, CAPPED, MASKED = range(4)


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("stride_batch", c.c_int64), ("stride_head", c.c_int64),
                ("stride_row", c.c_int64), ("dtype", c.c_int32), ("flags", c.c_int32)]


class Mask(c.Structure):
    _fields_ = [("data", c.c_void_p), ("stride_batch", c.c_int64), ("stride_head", c.c_int64),
                ("stride_query", c.c_int64), ("stride_key", c.c_int64), ("dtype", c.c_int32),
                ("flags", c.c_int32)]


class Desc(c.Structure):
    _fields_ = [("size", c.c_size_t), ("flags", c.c_int32), ("scale", c.c_float)]
    _fields_ += [(name, c.c_int64) for name in
                 "batch q_heads kv_heads q_len kv_len head_dim value_dim".split()]
    _fields_ += [(name, Tensor) for name in "query key value out lse".split()]
    _fields_ += [(name, c.c_void_p) for name in "q_starts kv_starts kv_lens q_offsets".split()]
    _fields_ += [(name, c.c_int64) for name in "page_size pages page_table_stride".split()]
    _fields_ += [("page_table", c.c_void_p), ("key_scale", Tensor), ("value_scale", Tensor)]
    _fields_ += [(name, c.c_int64) for name in "window_left window_right sink_tokens".split()]
    _fields_ += [("softcap", c.c_float), ("weights_stage", c.c_int32), ("mask", Mask),
                 ("tree_mask", c.c_void_p), ("tree_stride", c.c_int64), ("slopes", c.c_void_p),
                 ("head_scales", c.c_void_p), ("sinks", c.c_void_p), ("row_max", Tensor),
                 ("weights", Tensor)]


class Library:
    def __init__(self, path):
        self.lib = c.CDLL(path)
        self.lib.qkv_strerror.restype = c.c_char_p
        self.lib.qkv_isa_name.restype = c.c_char_p

    def isas(self):
        """The instruction sets that can be selected here."""
        names = ["scalar", "avx2", "avx512", "neon"]
        return [n for n in names if self.lib.qkv_isa_select(n.encode()) == 0]

    def select(self, isa):
        self.check(self.lib.qkv_isa_select(isa.encode()))

    def attention(self, desc):
        desc.size = c.sizeof(Desc)
        size = c.c_size_t()
        self.check(self.lib.qkv_attention_scratch_size(c.byref(desc), c.c_int64(1), c.byref(size)))
        memory = (c.c_char * (size.value + 64))()
        address = (c.addressof(memory) + 63) // 64 * 64
        self.check(self.lib.qkv_attention(c.byref(desc), c.c_void_p(address), size))

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.qkv_strerror(status).decode())
