/* A GPU that computes nothing: CUDA's runtime and driver, cuBLAS and cuDNN, as far as
 * torch asks for them. Memory is host pages that hardly anybody touches, kernels do
 * nothing, streams are always done. Host memory is pinned in name, and counted, as are
 * the copies between it and the device. Built and explained by _dummy_gpu.py.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#define __CUDA_RUNTIME_API_H__
#include <driver_types.h>

typedef int E;

static size_t number(const char *name, size_t otherwise) {
  const char *text = getenv(name);
  return text ? strtoull(text, NULL, 10) : otherwise;
}
static int capability(void) { return number("DUMMY_GPU_CAPABILITY", 80); }
static size_t total(void) { return number("DUMMY_GPU_BYTES", 80ull << 30); }
static size_t copied(void) { return (size_t)64 << 20; }
static int processors(void) { return number("DUMMY_GPU_PROCESSORS", 108); }

/* ---- memory ---- */
typedef struct { char *at; size_t bytes; } Block;
static Block blocks[1 << 18];
static int num_blocks;
static size_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Addresses grow, as a card's do; what was given back is used again, lowest first. */
static char *first;
#define STEP ((size_t)2 << 20)
#define RANGE ((size_t)1 << 42)
static E take(void **out, size_t bytes) {
  size_t rounded = (bytes + STEP - 1) & ~(STEP - 1);
  E failed = 2;
  pthread_mutex_lock(&lock);
  if (!first) {
    char *at = mmap(NULL, RANGE, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) abort();
    first = (char *)(((size_t)at + STEP - 1) & ~(STEP - 1));
  }
  if (used + rounded <= total()) {
    char *at = first;
    int i = 0; /* blocks are in order of address */
    for (; i < num_blocks && (size_t)(blocks[i].at - at) < rounded; i++)
      at = blocks[i].at + blocks[i].bytes;
    memmove(blocks + i + 1, blocks + i, (num_blocks++ - i) * sizeof *blocks);
    blocks[i] = (Block){at, rounded};
    used += rounded;
    *out = at;
    failed = 0;
  }
  pthread_mutex_unlock(&lock);
  return failed;
}
static E give(void *at) {
  pthread_mutex_lock(&lock);
  for (int i = 0; at && i < num_blocks; i++)
    if (blocks[i].at == at) {
      madvise(at, blocks[i].bytes, MADV_DONTNEED);
      used -= blocks[i].bytes;
      memmove(blocks + i, blocks + i + 1, (--num_blocks - i) * sizeof *blocks);
      break;
    }
  pthread_mutex_unlock(&lock);
  return 0;
}
static int is_ours(const void *p) {
  for (int i = 0; i < num_blocks; i++)
    if ((char *)p >= blocks[i].at && (char *)p < blocks[i].at + blocks[i].bytes)
      return 1;
  return 0;
}
E cudaMalloc(void **out, size_t bytes) { return take(out, bytes); }
E cudaFree(void *at) { return give(at); }
E cudaMallocAsync(void **out, size_t bytes, void *s) { return take(out, bytes); }
E cudaFreeAsync(void *at, void *s) { return give(at); }
E cudaMemGetInfo(size_t *f, size_t *t) { *t = total(); *f = total() - used; return 0; }

/* ---- pinned memory of the host ---- */
typedef struct { char *at; size_t bytes; int registered; } Pinned;
static Pinned pinned[1 << 16];
static int num_pinned;
static size_t pinned_bytes, registered_bytes;
static size_t bytes_out, bytes_back; /* of copies with registered memory at one end */
#define MOST_PINNED (int)(sizeof pinned / sizeof *pinned)
static int pinned_at(const void *p) { /* -1: not pinned */
  for (int i = 0; i < num_pinned; i++)
    if ((char *)p >= pinned[i].at && (char *)p < pinned[i].at + pinned[i].bytes)
      return i;
  return -1;
}
static E pin(void *at, size_t bytes, int registered) {
  E failed = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < num_pinned; i++)
    if ((char *)at < pinned[i].at + pinned[i].bytes && pinned[i].at < (char *)at + bytes)
      failed = cudaErrorHostMemoryAlreadyRegistered;
  if (!bytes) failed = cudaErrorInvalidValue;
  if (num_pinned == MOST_PINNED || pinned_bytes + bytes > number("DUMMY_GPU_PINNED_BYTES", -1))
    failed = cudaErrorMemoryAllocation;
  if (!failed) {
    pinned[num_pinned++] = (Pinned){at, bytes, registered};
    pinned_bytes += bytes;
    registered_bytes += registered ? bytes : 0;
  }
  pthread_mutex_unlock(&lock);
  return failed;
}
static E unpin(void *at, int registered) {
  E failed = registered ? cudaErrorHostMemoryNotRegistered : cudaErrorInvalidValue;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < num_pinned; i++)
    if (pinned[i].at == at && pinned[i].registered == registered) {
      pinned_bytes -= pinned[i].bytes;
      registered_bytes -= registered ? pinned[i].bytes : 0;
      pinned[i] = pinned[--num_pinned];
      failed = 0;
      break;
    }
  pthread_mutex_unlock(&lock);
  return failed;
}
E cudaHostRegister(void *at, size_t bytes, unsigned f) { return pin(at, bytes, 1); }
E cudaHostUnregister(void *at) { return unpin(at, 1); }
E cudaHostAlloc(void **out, size_t bytes, unsigned f) {
  *out = calloc(1, bytes + 4096);
  return *out ? pin(*out, bytes ? bytes : 1, 0) : cudaErrorMemoryAllocation;
}
E cudaFreeHost(void *at) {
  E failed = at ? unpin(at, 0) : 0;
  if (!failed) free(at);
  return failed;
}
/* For who measures: registered now, and copied from and to that since the process
 * began. What torch's own allocator pins (for .item(), say) is not among it. */
size_t dummy_gpu_registered_bytes(void) { return registered_bytes; }
size_t dummy_gpu_bytes_out(void) { return bytes_out; }
size_t dummy_gpu_bytes_back(void) { return bytes_back; }
static void count(void *to, const void *from, size_t n) {
  pthread_mutex_lock(&lock);
  int source = pinned_at(from), target = pinned_at(to);
  if (target >= 0 && pinned[target].registered && is_ours(from)) bytes_out += n;
  if (source >= 0 && pinned[source].registered && is_ours(to)) bytes_back += n;
  pthread_mutex_unlock(&lock);
}

static E copy(void *to, const void *from, size_t n) {
  if (n <= copied()) memmove(to, from, n);
  return 0;
}
E cudaMemcpy(void *d, const void *s, size_t n, int k) { return copy(d, s, n); }
E cudaMemcpyAsync(void *d, const void *s, size_t n, int k, void *st) { count(d, s, n); return copy(d, s, n); }
E cudaMemcpyPeerAsync(void *d, int a, const void *s, int b, size_t n, void *st) { return copy(d, s, n); }
E cudaMemset(void *d, int v, size_t n) { if (n <= copied()) memset(d, v, n); return 0; }
E cudaMemsetAsync(void *d, int v, size_t n, void *s) { return cudaMemset(d, v, n); }
static char symbols[1 << 20];
E cudaGetSymbolAddress(void **out, const void *s) { *out = symbols; return 0; }
E cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a);
  pthread_mutex_lock(&lock);
  if (is_ours(p)) { a->type = cudaMemoryTypeDevice; a->devicePointer = (void *)p; }
  else if (pinned_at(p) >= 0) {
    a->type = cudaMemoryTypeHost; a->devicePointer = a->hostPointer = (void *)p;
  }
  pthread_mutex_unlock(&lock);
  return 0;
}

/* ---- the device ---- */
E cudaGetDeviceCount(int *n) { *n = 1; return 0; }
E cudaGetDevice(int *d) { *d = 0; return 0; }
E cudaDriverGetVersion(int *v) { *v = 13020; return 0; }
E cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }
static size_t shared(void) {
  switch (capability()) {
    case 70: return 98304; case 75: return 65536; case 80: return 166912;
    case 86: case 89: case 120: return 101376; default: return 232448;
  }
}
static int threads(void) { return number("DUMMY_GPU_THREADS", 2048); }
E cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  const char *name = getenv("DUMMY_GPU_NAME");
  strncpy(p->name, name ? name : "a device that computes nothing", 255);
  p->totalGlobalMem = total(); p->sharedMemPerBlock = 49152; p->regsPerBlock = 65536;
  p->warpSize = 32; p->memPitch = 2147483647; p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536; p->major = capability() / 10; p->minor = capability() % 10;
  p->textureAlignment = 512; p->multiProcessorCount = processors();
  p->canMapHostMemory = 1; p->concurrentKernels = 1; p->unifiedAddressing = 1;
  p->l2CacheSize = 40 << 20; p->maxThreadsPerMultiProcessor = threads();
  p->sharedMemPerMultiprocessor = shared() + 1024; p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlockOptin = shared(); p->cooperativeLaunch = 1; p->managedMemory = 1; return 0;
}
E cudaDeviceGetAttribute(int *v, int a, int d) {
  switch (a) {
    case 1: *v = 1024; break;            /* threads per block */
    case 2: case 3: *v = 1024; break;
    case 4: *v = 64; break;
    case 5: *v = 2147483647; break;
    case 6: case 7: *v = 65535; break;
    case 8: *v = 49152; break;           /* shared memory per block */
    case 9: *v = 65536; break;
    case 10: *v = 32; break;             /* warp */
    case 11: *v = 2147483647; break;
    case 12: *v = 65536; break;          /* registers per block */
    case 13: *v = 1410000; break;        /* clock */
    case 16: *v = processors(); break;
    case 36: *v = 1215000; break;
    case 37: *v = 5120; break;
    case 38: *v = 40 << 20; break;
    case 39: *v = threads(); break;
    case 75: *v = capability() / 10; break;
    case 76: *v = capability() % 10; break;
    case 81: *v = shared() + 1024; break;
    case 82: *v = 65536; break;
    case 97: *v = shared(); break;
    case 106: *v = 32; break;
    default: *v = 1;
  }
  return 0;
}
E cudaDeviceGetStreamPriorityRange(int *low, int *high) { *low = 0; *high = -5; return 0; }
E cudaDeviceGetPCIBusId(char *s, int n, int d) { strncpy(s, "0000:00:00.0", n); return 0; }
E cudaDeviceCanAccessPeer(int *v, int a, int b) { *v = 0; return 0; }
const char *cudaGetErrorString(int e) { return e == 2 ? "out of memory" : e ? "not there" : "no error"; }
const char *cudaGetErrorName(int e) { return e == 2 ? "cudaErrorMemoryAllocation" : e ? "cudaErrorNotSupported" : "cudaSuccess"; }

/* ---- streams and events: all is done when it is asked for ---- */
typedef struct { struct timespec at; } Event;
static E made(void **out) { *out = calloc(1, 64); return 0; }
E cudaStreamCreate(void **s) { return made(s); }
E cudaStreamCreateWithFlags(void **s, unsigned f) { return made(s); }
E cudaStreamCreateWithPriority(void **s, unsigned f, int p) { return made(s); }
E cudaStreamDestroy(void *s) { free(s); return 0; }
E cudaStreamGetPriority(void *s, int *p) { *p = 0; return 0; }
E cudaStreamIsCapturing(void *s, int *c) { *c = 0; return 0; }
E cudaStreamGetCaptureInfo(void *s, int *c, unsigned long long *id, void *g, void *d, void *e, void *n) {
  *c = 0; if (id) *id = 0; return 0;
}
E cudaThreadExchangeStreamCaptureMode(int *m) { return 0; }
E cudaEventCreate(void **e) { return made(e); }
E cudaEventCreateWithFlags(void **e, unsigned f) { return made(e); }
E cudaEventDestroy(void *e) { free(e); return 0; }
E cudaEventRecord(void *e, void *s) { clock_gettime(CLOCK_MONOTONIC, &((Event *)e)->at); return 0; }
E cudaEventRecordWithFlags(void *e, void *s, unsigned f) { return cudaEventRecord(e, s); }
E cudaEventElapsedTime(float *ms, void *a, void *b) {
  struct timespec x = ((Event *)a)->at, y = ((Event *)b)->at;
  *ms = (y.tv_sec - x.tv_sec) * 1e3f + (y.tv_nsec - x.tv_nsec) / 1e6f;
  return 0;
}
E cudaStreamAddCallback(void *s, void (*f)(void *, int, void *), void *u, unsigned g) { f(s, 0, u); return 0; }
E cudaLaunchHostFunc(void *s, void (*f)(void *), void *u) { f(u); return 0; }

/* ---- kernels ---- */
static int fat;
void **__cudaRegisterFatBinary(void *b) { return (void **)&fat; }
typedef struct { unsigned x, y, z; } Dim;
static __thread struct { Dim grid, block; size_t bytes; void *stream; } pushed;
unsigned __cudaPushCallConfiguration(Dim g, Dim b, size_t n, void *s) {
  pushed.grid = g; pushed.block = b; pushed.bytes = n; pushed.stream = s; return 0;
}
E __cudaPopCallConfiguration(Dim *g, Dim *b, size_t *n, void **s) {
  *g = pushed.grid; *b = pushed.block; *n = pushed.bytes; *s = pushed.stream; return 0;
}
E __cudaGetKernel(void **k, const void *f) { *k = (void *)f; return 0; }
E cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024; a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = capability();
  a->maxDynamicSharedSizeBytes = shared();
  return 0;
}
E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned g) {
  *n = b ? threads() / b : 1; if (!*n) *n = 1; return 0;
}
E cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int b, size_t s) {
  *n = b ? threads() / b : 1; if (!*n) *n = 1; return 0;
}

/* ---- the driver, for segments that grow ---- */
static E nothing(void) { return 0; }
E cuMemCreate(unsigned long long *h, size_t n, void *p, unsigned long long f) {
  pthread_mutex_lock(&lock);
  int full = used + n > total();
  if (!full) { used += n; *h = n; }
  pthread_mutex_unlock(&lock);
  return full ? 2 : 0;
}
E cuMemRelease(unsigned long long h) {
  pthread_mutex_lock(&lock); used -= h; pthread_mutex_unlock(&lock);
  return 0;
}
E cuMemAddressReserve(void **out, size_t n, size_t align, void *at, unsigned long long f) {
  void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *out = p;
  return p == MAP_FAILED ? 2 : 0;
}
E cuMemAddressFree(void *at, size_t n) { munmap(at, n); return 0; }
E cuMemGetAllocationGranularity(size_t *n, void *p, int o) { *n = 2 << 20; return 0; }
E cuDriverGetVersion(int *v) { *v = 13020; return 0; }
/* what Triton asks for */
E cuLaunchKernelEx(void) { return 0; }
E cuTensorMapEncodeIm2col(void) { return 0; }
E cuOccupancyMaxActiveClusters(int *n) { *n = 1; return 0; }
E cuCtxSetLimit(void) { return 0; }
E cuCtxGetLimit(size_t *v, int a) { *v = 0; return 0; }
E cuDeviceGetCount(int *n) { *n = 1; return 0; }
E cuInit(unsigned f) { return 0; }
E cuGetErrorString(int e, const char **s) { *s = "not there"; return 0; }
E cuDeviceGetAttribute(int *v, int a, int d) { return cudaDeviceGetAttribute(v, a, d); }
E cuDeviceGet(int *d, int n) { *d = 0; return 0; }
E cuCtxGetDevice(int *d) { *d = 0; return 0; }
E cuCtxGetCurrent(void **c) { *c = &fat; return 0; }
E cuDevicePrimaryCtxRetain(void **c, int d) { *c = &fat; return 0; }
E cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { *f = 0; *a = 1; return 0; }
E cuModuleLoadData(void **m, const void *i) { return made(m); }
E cuModuleLoadDataEx(void **m, const void *i, unsigned n, void *o, void *v) { return made(m); }
E cuModuleGetFunction(void **f, void *m, const char *n) { return made(f); }
E cuFuncGetAttribute(int *v, int a, void *f) { *v = a ? 32 : 1024; return 0; }
E cudaGetDriverEntryPointByVersion(const char *s, void **f, unsigned v, unsigned long long g, int *q) {
  *f = dlsym(RTLD_DEFAULT, s);
  if (!*f) *f = nothing;
  if (q) *q = 0;
  return 0;
}

/* ---- cuBLAS ---- */
E cublasCreate_v2(void **h) { return made(h); }
E cublasGetMathMode(void *h, int *m) { *m = 0; return 0; }
E cublasGetPointerMode_v2(void *h, int *m) { *m = 0; return 0; }
size_t cublasLtGetVersion(void) { return 130000; }
E cublasLtCreate(void **h) { return made(h); }
E cublasLtMatmulDescCreate(void **d, int c, int t) { return made(d); }
E cublasLtMatmulPreferenceCreate(void **d) { return made(d); }
E cublasLtMatrixLayoutCreate(void **d, int t, unsigned long long r, unsigned long long c, long long ld) { return made(d); }
E cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *e, void *p, int n, void *out, int *found) {
  memset(out, 0, 96); *found = 1; return 0;  /* the algorithm, its workspace, its state */
}

/* ---- cuDNN: one engine for everything, that needs no workspace ---- */
size_t cudnnGetVersion(void) { return number("DUMMY_GPU_CUDNN", 92000); }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char *cudnnGetErrorString(int e) { return e ? "not there" : "no error"; }
void cudnnGetLastErrorString(char *s, size_t n) { if (n) *s = 0; }
E cudnnCreate(void **h) { return made(h); }
E cudnnBackendCreateDescriptor(int t, void **d) { return made(d); }
E cudnnBackendGetAttribute(void *d, int name, int type, long long most, long long *n, void *out) {
  static const char size[] = {4, 4, 4, 1, 8, 4, 8, 8};
  if (type == 15) { if (n) *n = 1; return 0; } /* descriptors, made by who asks */
  if (n) *n = out && most ? 1 : 0;
  if (out && most) memset(out, 0, type == 3 || type == 5 ? 8 : 4);
  return 0;
}
#define MAKES(name) E name(void **d) { return made(d); }
MAKES(cudnnCreateActivationDescriptor) MAKES(cudnnCreateCTCLossDescriptor)
MAKES(cudnnCreateConvolutionDescriptor) MAKES(cudnnCreateDropoutDescriptor)
MAKES(cudnnCreateFilterDescriptor) MAKES(cudnnCreatePoolingDescriptor)
MAKES(cudnnCreateRNNDataDescriptor) MAKES(cudnnCreateRNNDescriptor)
MAKES(cudnnCreateSpatialTransformerDescriptor) MAKES(cudnnCreateTensorDescriptor)
E cudnnDropoutGetStatesSize(void *h, size_t *n) { *n = number("DUMMY_GPU_CUDNN_DROPOUT_BYTES", 0); return 0; }
E cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int m, int o, void *x, void *z, void *y, void *b, void *a, size_t *n) { *n = 0; return 0; }
E cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int m, int o, void *x, void *y, void *dy, void *dz, void *dx, void *b, void *a, size_t *n) { *n = 0; return 0; }
E cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int m, int o, void *a, void *x, size_t *n) { *n = 0; return 0; }
E cudnnGetRNNWeightSpaceSize(void *h, void *r, size_t *n) { *n = 0; return 0; }
E cudnnGetRNNTempSpaceSizes(void *h, void *r, int m, void *x, size_t *w, size_t *s) { if (w) *w = 0; if (s) *s = 0; return 0; }
E cudaGraphInstantiateWithFlags(void **g, void *h, unsigned long long f) { return 801; }
E cudaStreamBeginCapture(void *s, int m) { return 801; }
E cudaStreamBeginCaptureToGraph(void *s) { return 801; }
E cudaStreamEndCapture(void *s, void **g) { return 801; }
E cudaIpcGetMemHandle(void *h, void *p) { return 801; }
E cudaIpcOpenMemHandle(void **p) { return 801; }
E cudaIpcGetEventHandle(void *h, void *e) { return 801; }
E cudaIpcOpenEventHandle(void **e) { return 801; }
E cudaDeviceGetDefaultMemPool(void **p, int d) { return made(p); }
E cudaLibraryLoadData(void **l) { return made(l); }
E cudaLibraryGetKernel(void **k) { return made(k); }
E cudaGraphConditionalHandleCreate(void *h) { return 801; }
E cudaGraphAddNode(void *h) { return 801; }
E cudaGraphGetNodes(void *h) { return 801; }
E cudaGraphNodeGetDependencies(void *h) { return 801; }
E cudaGraphDebugDotPrint(void *h) { return 801; }
E cudaGraphLaunch(void *h) { return 801; }
E cudaMemPoolGetAttribute(void *h) { return 0; }
E cudaMemPoolSetAttribute(void *h) { return 0; }
E cudaMemPoolSetAccess(void *h) { return 0; }
E cudaMemPoolTrimTo(void *h) { return 0; }
E cudaStreamUpdateCaptureDependencies(void *h) { return 801; }
E cuTensorMapEncodeTiled(void *h) { return 0; }
E cuPointerGetAttribute(void *v, int a, void *p) { *(long long *)v = 0; return 0; }
E cuModuleLoad(void **m) { return made(m); }
E cuLinkCreate_v2(void *h) { return 801; }
E cuLinkAddData_v2(void *h) { return 801; }
E cuLinkComplete(void *h) { return 801; }
E cufftCreate(int *p) { *p = 1; return 0; }
E cufftXtMakePlanMany(int p, int r, void *n, void *a, long long b, long long c, int d, void *e, long long f, long long g, int h, long long i, size_t *w, int j) { *w = 0; return 0; }
E cufftDestroy(int p) { return 0; }
E cufftSetAutoAllocation(int p, int a) { return 0; }
E cufftSetStream(int p, void *a) { return 0; }
E cufftSetWorkArea(int p, void *a) { return 0; }
E cufftXtExec(int p) { return 0; }
E cudaDeviceEnablePeerAccess(int d, unsigned f) { return 0; }
E cudaIpcCloseMemHandle(void *p) { return 0; }
/* ---- NVML, which is asked for the links between cards ---- */
E nvmlInit_v2(void) { return 0; }
E nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **h) { return made(h); }
E nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 3; }
E nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 3; }
E nvmlDeviceGetComputeRunningProcesses(void *h, unsigned *n, void *out) { *n = 0; return 0; }
E nvmlDeviceGetGpuFabricInfoV(void *h, void *info) { return 0; }  /* state 0: not supported */
E nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13020; return 0; }
E cudnnGetProperty(int what, int *v) { /* 9.20.1 is 92001 */
  int n = cudnnGetVersion();
  *v = what == 0 ? n / 10000 : what == 1 ? n / 100 % 100 : n % 100;
  return 0;
}
