// Kernels that do nothing, for host.py: what remains is the cost of asking for them.
extern "C" __global__ void empty() {}
extern "C" __global__ void twelve(const void* a, const void* b, const void* c, const void* d, void* e, void* f, void* g, void* h,
                                  unsigned i, unsigned j, float k, float l) {
  if (i == 0xffffffffu && !a && !b && !c && !d && !e && !f && !g && j && k > l) *static_cast<float*>(h) = k;
}
