"""The way from a tensor to a params struct, without a GPU: the launcher of attn_dist is replaced, by LD_PRELOAD, with a
plain loop over what `csrc/params.h` says the struct means, on host memory. What comes out must be the definition.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from htree_cuda import kernels

ROOT = Path(__file__).resolve().parents[2]

STAND_IN = r"""
#include <cmath>
#include <cstring>
#include "params.h"

namespace htree_cuda {

DeviceGuard::DeviceGuard(int) {}
DeviceGuard::~DeviceGuard() {}

static double element(void const* base, std::int64_t index, DType dtype) {
  std::uint16_t half;
  std::memcpy(&half, static_cast<char const*>(base) + 2 * index, 2);
  if (dtype == DType::kBFloat16) {
    std::uint32_t const bits = static_cast<std::uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  int const exponent = half >> 10 & 31, mantissa = half & 1023;
  double const magnitude = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
  return half >> 15 ? -magnitude : magnitude;
}

void attn_dist(AttnDistParams const& p, void*) {
  std::int64_t const groups = (p.h_q + 63) / 64;
  for (std::int64_t b = 0; b < p.B; ++b)
    for (std::int64_t g = 0; g < groups; ++g)
      for (std::int64_t s = 0; s < p.s_q; ++s)
        for (std::int64_t j = 0; j < p.topk; ++j) {
          std::int64_t const i = p.indices[b * p.indices_stride_b + s * p.indices_stride_s + j * p.indices_stride_t];
          bool valid = i >= 0 && i < p.s_kv;
          std::int64_t const at = b * p.topk_length_stride_b + s * p.topk_length_stride_s;
          if (p.topk_length) valid = valid && j < p.topk_length[at];
          if (p.q_start) valid = valid && i < (p.q_start[b] + s + 1) / p.k_stride;
          double sum = 0;
          for (std::int64_t h = 64 * g; valid && h < p.h_q && h < 64 * g + 64; ++h) {
            double const lse = p.lse[b * p.lse_stride_b + s * p.lse_stride_s + h * p.lse_stride_h];
            if (std::isinf(lse)) continue;
            double dot = 0;
            for (std::int64_t d = 0; d < p.d_qk; ++d)
              dot += element(p.q, b * p.q_stride_b + s * p.q_stride_s + h * p.q_stride_h + d, p.dtype) *
                     element(p.k, b * p.k_stride_b + i * p.k_stride_s + d, p.dtype);
            sum += std::exp(dot * p.sm_scale - lse * std::log(p.lse_base));
          }
          p.out[((b * groups + g) * p.s_q + s) * p.topk + j] = static_cast<float>(sum);
        }
}

}  // namespace htree_cuda
"""

SCRIPT = r"""
import math, torch
from htree_cuda import kernels
from htree_cuda import definition
kernels._place = lambda x: {"device": 0, "stream": 0}
g = torch.Generator().manual_seed(0)
for dtype in (torch.bfloat16, torch.float16):
    for q_start, lengths, base in ((None, False, 2.0), ([3, 40], True, math.e), ([0, 7], False, 2.0)):
        B, s_q, h_q, s_kv, topk, d = 2, 3, 70, 30, 11, 128
        q = torch.randn(B, 2 * s_q, h_q + 5, d + 8, generator=g).to(dtype)[:, ::2, 2:-3, 8:]
        k = torch.randn(B, s_kv, 2, d + 16, generator=g).to(dtype)[:, :, 1:, :d]
        indices = torch.randint(-2, s_kv + 2, (topk, B, 1, s_q), generator=g, dtype=torch.int32).permute(1, 3, 2, 0)
        lse = torch.randn(h_q, B, s_q, generator=g).permute(1, 2, 0) + 4
        lse[0, 1, 69] = math.inf
        length = torch.randint(0, topk + 3, (s_q, B), generator=g, dtype=torch.int32).T if lengths else None
        options = dict(sm_scale=0.11, q_start=q_start, k_stride=2, topk_length=length, lse_base=base)
        out = torch.full((B, 2, s_q, topk), math.nan)
        kernels.attn_dist(q, k, indices, lse, out, **options)
        exact = definition.attn_dist(q, k, indices, lse, **options)
        torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-12)
print("equal")
"""


@pytest.mark.skipif(not kernels.built(), reason=f"no kernel library: {kernels.why_not_built()}")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_attn_dist_arguments_arrive(tmp_path):
    source, library = tmp_path / "stand_in.cpp", tmp_path / "stand_in.so"
    source.write_text(STAND_IN)
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stdout + done.stderr
