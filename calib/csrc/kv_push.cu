// Pages of one GPU's memory written into pages of another's over the link by a kernel: one CTA a page at a time, 16
// bytes a thread and step. Sizes are in 16-byte words.

extern "C" __global__ void kv_push(uint4* target, const uint4* source, const int* target_pages,
                                   const int* source_pages, int pages, long long page_words) {
  for (int page = blockIdx.x; page < pages; page += gridDim.x) {
    uint4* to = target + (long long)target_pages[page] * page_words;
    const uint4* from = source + (long long)source_pages[page] * page_words;
    for (long long i = threadIdx.x; i < page_words; i += 4 * blockDim.x) {
      uint4 held[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (i + j * blockDim.x < page_words) held[j] = from[i + j * blockDim.x];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (i + j * blockDim.x < page_words) to[i + j * blockDim.x] = held[j];
    }
  }
}
