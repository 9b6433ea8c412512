// Which SMs a stream may use: every CTA records its %smid, then stays resident for a while so that the block
// scheduler has to fill every SM of the partition before it can reuse one.

extern "C" __global__ void record_smid(unsigned int* smid, long long resident_cycles) {
  if (threadIdx.x == 0) {
    unsigned int id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    smid[blockIdx.x] = id;
  }
  const long long start = clock64();
  while (clock64() - start < resident_cycles) {
  }
}

// %nsmid bounds the ids; it is not promised to equal the SM count.
extern "C" __global__ void record_nsmid(unsigned int* nsmid) {
  unsigned int count;
  asm volatile("mov.u32 %0, %%nsmid;" : "=r"(count));
  nsmid[0] = count;
}

// Holds one warp for a given time: the delay of a staggered start.
extern "C" __global__ void hold(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}
