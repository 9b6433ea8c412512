// A bandwidth probe: reads `count` 16-byte words once, four independent loads in flight per thread. Each thread's
// sum is stored only where it equals `watched`, so that the loads stay and no store traffic is added.

extern "C" __global__ void stream_read(const uint4* __restrict__ data, unsigned long long count,
                                       unsigned int watched, unsigned int* sink) {
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
  unsigned int sum = 0;
  for (; i + 3 * step < count; i += 4 * step) {
    const uint4 a = data[i];
    const uint4 b = data[i + step];
    const uint4 c = data[i + 2 * step];
    const uint4 d = data[i + 3 * step];
    sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
    sum ^= c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  for (; i < count; i += step) {
    const uint4 a = data[i];
    sum ^= a.x ^ a.y ^ a.z ^ a.w;
  }
  if (sum == watched) {
    sink[0] = sum;
  }
}
