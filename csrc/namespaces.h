// The rooms of csrc, one namespace a folder. An op opens the rooms that all ops share with using-directives, which need
// the namespaces declared.
#pragma once

namespace htree_cuda {
namespace host {}    // csrc/host: launchers
namespace device {}  // csrc/device: ideas of the chip
namespace tree {}    // csrc/tree: what forward and backward share
}  // namespace htree_cuda
