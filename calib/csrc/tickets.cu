// Synthetic CTAs of two kinds in one grid, and four ways to say which CTA does what. A compute job runs chains of
// multiply-adds, a bandwidth job streams its own stretch of memory; how long each lasts is data. No CTA ever waits
// for another: a ticket is drawn, the job is done, the CTA ends. So no order of CTAs and no number of SMs can lock.
//
// The SM-aware rule is POD-Attention's (ASPLOS 2025, section 4.1): a counter an SM says which kind is due there, a
// counter a kind hands out the jobs, and a CTA whose kind has run out takes one of the other kind.

enum { PROPORTIONAL = 0, HALF = 1, CTA_PARALLEL = 2 };
enum { COMPUTE = 0, BANDWIDTH = 1 };
constexpr int CHAINS = 4;      // independent multiply-adds a thread: four warps of them fill an SM's pipes
constexpr int ADDS = 64;       // multiply-adds of each chain in one loop
constexpr int LOADS = 8;       // 16-byte loads in flight a thread
constexpr int WORKERS = 128;   // threads of one job

struct Jobs {
  const int* work;             // loops of each job
  int count;
};

struct Memory {
  const uint4* words;
  unsigned long long count;    // of 16 bytes
  unsigned int watched;        // a thread whose XOR is this stores it, so that the loads stay
  unsigned int* sink;
};

struct Log {                   // a row a CTA: kind, job, SM, start and end in the GPU's nanoseconds
  long long* row;
  unsigned int* done;          // times each job was done, compute first
};

__device__ long long now() {
  long long time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

__device__ unsigned int sm_id() {
  unsigned int id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

__device__ void add_loop(float* sum, float factor) {
#pragma unroll
  for (int i = 0; i < ADDS; ++i) {
#pragma unroll
    for (int c = 0; c < CHAINS; ++c) sum[c] = fmaf(sum[c], factor, 1.0f);
  }
}

__device__ void start_chains(float* sum, int worker) {
  for (int c = 0; c < CHAINS; ++c) sum[c] = worker + c;
}

__device__ void keep(const float* sum, const Memory& memory) {
  float total = 0.0f;
  for (int c = 0; c < CHAINS; ++c) total += sum[c];
  if (__float_as_uint(total) == memory.watched) memory.sink[1] = memory.watched;
}

// Where a job starts to read: jobs are spread over all of the memory.
__device__ unsigned long long place(const Memory& memory, int job, int jobs, int worker) {
  const unsigned long long stretch = (unsigned long long)LOADS * WORKERS;
  return memory.count / stretch / max(jobs, 1) * job * stretch + worker;
}

__device__ unsigned long long fetch(const Memory& memory, unsigned long long at, uint4* held) {
  if (at + LOADS * WORKERS > memory.count) at = threadIdx.x % WORKERS;
#pragma unroll
  for (int i = 0; i < LOADS; ++i) held[i] = memory.words[at + i * WORKERS];
  return at + LOADS * WORKERS;
}

__device__ unsigned int folded(const uint4* held) {
  unsigned int xors = 0;
#pragma unroll
  for (int i = 0; i < LOADS; ++i) xors ^= held[i].x ^ held[i].y ^ held[i].z ^ held[i].w;
  return xors;
}

__device__ void compute(const Memory& memory, int loops, int worker, float factor) {
  float sum[CHAINS];
  start_chains(sum, worker);
  for (int i = 0; i < loops; ++i) add_loop(sum, factor);
  keep(sum, memory);
}

__device__ void bandwidth(const Memory& memory, int job, int jobs, int loops, int worker) {
  unsigned int xors = 0;
  unsigned long long at = place(memory, job, jobs, worker);
  for (int i = 0; i < loops; ++i) {
    uint4 held[LOADS];
    at = fetch(memory, at, held);
    xors ^= folded(held);
  }
  if (xors == memory.watched) memory.sink[0] = xors;
}

__device__ void mark(const Log& log, int kind, int job, int computes, long long start) {
  long long* row = log.row + 5LL * blockIdx.x;
  row[0] = kind;
  row[1] = job;
  row[2] = sm_id();
  row[3] = start;
  row[4] = now();
  if (job >= 0) atomicAdd(log.done + (kind == COMPUTE ? job : computes + job), 1u);
}

// Which kind the next CTA of an SM takes, from its ticket there.
__device__ int due(int policy, unsigned int ticket, int computes, int bandwidths) {
  if (computes == 0 || bandwidths == 0) return computes == 0;
  if (policy == HALF) return ticket % 2;
  if (computes <= bandwidths) return ticket % (bandwidths / computes + 1) > 0;
  const unsigned int first = computes / bandwidths;
  return ticket % (first + 1) >= first;
}

__device__ void draw(int policy, const Jobs* jobs, unsigned int* counters, unsigned int sms, int* kind, int* job) {
  if (policy == CTA_PARALLEL) {
    // fixed at launch: kinds alternate in proportion by block index, wherever the blocks land
    const unsigned long long total = jobs[0].count + jobs[1].count, block = blockIdx.x;
    const int before = (int)(block * jobs[0].count / total);
    *kind = (int)((block + 1) * jobs[0].count / total) > before ? COMPUTE : BANDWIDTH;
    *job = *kind == COMPUTE ? before : (int)block - before;
    return;
  }
  *kind = due(policy, atomicAdd(counters + sm_id(), 1u), jobs[0].count, jobs[1].count);
  *job = atomicAdd(counters + sms + *kind, 1u);
  if (*job >= jobs[*kind].count) {
    *kind = !*kind;
    *job = atomicAdd(counters + sms + *kind, 1u);
  }
  if (*job >= jobs[*kind].count) *job = -1;
}

extern "C" __global__ void tickets(
    const int* compute_work, int computes, const int* bandwidth_work, int bandwidths, const uint4* words,
    unsigned long long word_count, unsigned int watched, unsigned int* sink, float factor, long long* rows,
    unsigned int* done, int policy, unsigned int* counters, unsigned int sms) {
  __shared__ int kind, job;
  const Jobs jobs[2] = {{compute_work, computes}, {bandwidth_work, bandwidths}};
  const Memory memory = {words, word_count, watched, sink};
  const long long start = now();
  if (threadIdx.x == 0) draw(policy, jobs, counters, sms, &kind, &job);
  __syncthreads();
  if (job >= 0 && kind == COMPUTE) compute(memory, compute_work[job], threadIdx.x, factor);
  if (job >= 0 && kind == BANDWIDTH) bandwidth(memory, job, bandwidths, bandwidth_work[job], threadIdx.x);
  __syncthreads();
  if (threadIdx.x == 0) mark({rows, done}, kind, job, computes, start);
}

// One job of each kind in every thread: the multiply-adds stand between a loop's loads and their use.
extern "C" __global__ void intra_thread(
    const int* compute_work, int computes, const int* bandwidth_work, int bandwidths, const uint4* words,
    unsigned long long word_count, unsigned int watched, unsigned int* sink, float factor, long long* rows,
    unsigned int* done) {
  const Memory memory = {words, word_count, watched, sink};
  const int i = blockIdx.x, worker = threadIdx.x;
  const long long start = now();
  const int adds = i < computes ? compute_work[i] : 0;
  const int reads = i < bandwidths ? bandwidth_work[i] : 0;
  float sum[CHAINS];
  unsigned int xors = 0;
  unsigned long long at = place(memory, i, bandwidths, worker);
  start_chains(sum, worker);
  const int steps = max(adds, reads);
  for (int step = 0; step < steps; ++step) {
    // both are spread over all steps, so that neither ends early
    const bool read = (long long)(step + 1) * reads / steps > (long long)step * reads / steps;
    uint4 held[LOADS] = {};
    if (read) at = fetch(memory, at, held);
    if ((long long)(step + 1) * adds / steps > (long long)step * adds / steps) add_loop(sum, factor);
    xors ^= folded(held);
  }
  keep(sum, memory);
  if (xors == memory.watched) memory.sink[0] = xors;
  __syncthreads();
  if (threadIdx.x == 0) {
    if (i < computes) atomicAdd(done + i, 1u);
    mark({rows, done}, BANDWIDTH, i < bandwidths ? i : -1, computes, start);
  }
}

// Horizontal fusion: the first half of a CTA's warps does a compute job, the second half a bandwidth job; the CTA
// holds its resources until both are done.
extern "C" __global__ void horizontal(
    const int* compute_work, int computes, const int* bandwidth_work, int bandwidths, const uint4* words,
    unsigned long long word_count, unsigned int watched, unsigned int* sink, float factor, long long* rows,
    unsigned int* done) {
  const Memory memory = {words, word_count, watched, sink};
  const int i = blockIdx.x;
  const long long start = now();
  if (threadIdx.x < WORKERS) {
    if (i < computes) compute(memory, compute_work[i], threadIdx.x, factor);
  } else if (i < bandwidths) {
    bandwidth(memory, i, bandwidths, bandwidth_work[i], threadIdx.x - WORKERS);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (i < computes) atomicAdd(done + i, 1u);
    mark({rows, done}, BANDWIDTH, i < bandwidths ? i : -1, computes, start);
  }
}
