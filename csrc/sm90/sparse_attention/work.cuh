// The units of this kernel. Where there are few queries, as in a step of decoding, several CTAs share a list (Config::kParts):
// each has a part of its tiles, and nothing else, and leaves sums, which join.cuh puts together.
#pragma once

#include "device/query_groups.cuh"
#include "config.cuh"

namespace htree_cuda::sm90::sparse_attention {

struct Unit : query_groups::Unit {  // with parts, `group` counts them and `tiles` are those of the part
  int first_tile;
};

template <class C>
class WorkList : public query_groups::WorkList<KernelParams> {
public:
  __device__ __forceinline__ explicit WorkList(KernelParams const& p) : query_groups::WorkList<KernelParams>(p), p_(p) {}

  __device__ __forceinline__ Unit unit() const {
    Unit u{query_groups::WorkList<KernelParams>::unit(), 0};
    if constexpr (C::kParts) {
      int const part = u.group % p_.parts;
      int const each = u.tiles / p_.parts;
      int const longer = u.tiles % p_.parts;  // parts that have one tile more, the first ones
      u.first_tile = part * each + min(part, longer);
      u.tiles = each + (part < longer ? 1 : 0);
    }
    return u;
  }

private:
  KernelParams const& p_;
};

template <class C>
__device__ __forceinline__ int first_head(KernelParams const& p, Unit const& u) {
  return (C::kParts ? u.group / p.parts : u.group) * C::kGroupHeads;
}

}  // namespace htree_cuda::sm90::sparse_attention
