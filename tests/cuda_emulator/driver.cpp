// A libcuda.so.1 for machines without a GPU: device memory is the host's, and a launch runs the kernel's own source,
// compiled for the host (compiler.cpp), one thread after the other. Barriers and shuffles are real meetings, so a thread
// that misses one is a deadlock; threads are scheduled so as to drift apart as far as the meetings allow, so a missing
// barrier is a wrong answer; every block starts with its shared memory full of NaN. Real cubins load, and do not run.
//
//   MOCK_FAIL=name    that function fails       MOCK_SM=90     the device's compute capability
//   MOCK_LOG=file     one line per launch       MOCK_SEED=n    of the schedule
#include <dlfcn.h>
#include <stdlib.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "host.hpp"

namespace {

constexpr size_t STACK = 64 << 10;
enum { OK = 0, INVALID = 1, NO_DEVICE = 101, BAD_IMAGE = 200, BAD_CONTEXT = 201, NO_BINARY = 209, NOT_FOUND = 500,
       LAUNCH_FAILED = 719 };

// A meeting of `members` threads, again and again. Those that have ended count no more.
struct Meeting {
  int members = 0, present = 0;
  unsigned long times = 0;
};
struct Warp {
  Meeting meeting;
  char given[2][32][8];
};
struct Thread {
  ucontext_t context;
  char* stack;
  bool done;
};

Emulator lent;
ucontext_t scheduler;
std::vector<Thread> threads;
std::vector<Warp> warps;
Meeting block;
std::map<std::string, std::vector<char>> shared_memory;
std::function<void()> body;
unsigned current;
unsigned long progress;

void pause() { swapcontext(&threads[current].context, &scheduler); }
void meet(Meeting& m) {
  const unsigned long time = m.times;
  if (++m.present == m.members) {
    m.present = 0;
    m.times++;
    progress++;
  }
  while (m.times == time) pause();
}
void barrier() { meet(block); }
void exchange(const void* mine, void* theirs, unsigned size, int lane) {
  // Two buffers, by turns: nobody writes what somebody may still read.
  Warp& warp = warps[current / 32];
  auto& given = warp.given[warp.meeting.times & 1];
  memcpy(given[current % 32], mine, size);
  meet(warp.meeting);
  memcpy(theirs, given[lane], size);
}
void* shared(const char* name, unsigned size) {
  auto& memory = shared_memory[name];
  if (memory.empty()) memory.assign(size, (char)0xff);  // NaN
  return memory.data();
}
void entry() {
  body();
  threads[current].done = true;
  progress++;
  pause();
}

// Runs one block: a warp, chosen at random, goes as far as it can before another is chosen.
bool run_block(std::mt19937& random) {
  const unsigned n = threads.size();
  warps.assign((n + 31) / 32, Warp());
  block = Meeting();
  block.members = n;
  shared_memory.clear();
  for (unsigned t = 0; t < n; t++) {
    warps[t / 32].meeting.members++;
    Thread& thread = threads[t];
    thread.done = false;
    getcontext(&thread.context);
    thread.context.uc_stack = {thread.stack, 0, STACK};
    thread.context.uc_link = &scheduler;
    makecontext(&thread.context, entry, 0);
  }
  std::vector<char> stuck(warps.size(), 0);
  for (unsigned left = n; left > 0;) {
    std::vector<unsigned> able;
    for (unsigned w = 0; w < warps.size(); w++)
      if (!stuck[w]) able.push_back(w);
    if (able.empty()) {
      fprintf(stderr, "emulator: %u of %u threads wait for others that never come\n", left, n);
      return false;
    }
    const unsigned w = able[random() % able.size()];
    std::vector<unsigned> lanes;
    for (unsigned t = 32 * w; t < std::min(n, 32 * w + 32); t++) lanes.push_back(t);
    for (unsigned long before = progress - 1; before != progress;) {
      before = progress;
      const unsigned long met = block.times;
      std::shuffle(lanes.begin(), lanes.end(), random);
      for (unsigned t : lanes) {
        if (threads[t].done) continue;
        current = t;
        lent.thread.x = t;
        swapcontext(&scheduler, &threads[t].context);
        left -= threads[t].done;
      }
      if (block.times != met) std::fill(stuck.begin(), stuck.end(), 0);
    }
    stuck[w] = 1;
  }
  return true;
}

bool run(unsigned blocks, unsigned size, std::function<void()> work) {
  const char* seed = getenv("MOCK_SEED");
  std::mt19937 random(seed ? atoi(seed) : 1);
  body = work;
  lent = Emulator{{0, 0, 0}, {0, 0, 0}, {size, 1, 1}, {blocks, 1, 1}, barrier, exchange, shared};
  threads.resize(size);
  for (auto& t : threads) t.stack = (char*)malloc(STACK);
  bool good = true;
  for (unsigned b = 0; b < blocks && good; b++) {
    lent.block.x = b;
    good = run_block(random);
  }
  for (auto& t : threads) free(t.stack);
  return good;
}

// ---- the driver ----

struct Module {
  void* library;      // null for a real cubin
  std::string image;  // of a real cubin: its kernels' names are in it
};
struct Kernel {
  std::string name;
  void (*thread)(void**);
  unsigned threads;
};
std::mutex one_at_a_time;
thread_local int depth;
char context;

bool fails(const char* name) {
  const char* wanted = getenv("MOCK_FAIL");
  return wanted && !strcmp(wanted, name);
}
int capability() {
  const char* sm = getenv("MOCK_SM");
  return sm ? atoi(sm) : 90;
}
#define FAIL_IF_ASKED if (fails(__func__)) return INVALID

}  // namespace

extern "C" {
int cuInit(unsigned) {
  FAIL_IF_ASKED;
  return OK;
}
int cuGetErrorString(int code, const char** text) {
  *text = code == NO_BINARY       ? "no kernel image is available for execution on the device"
          : code == INVALID       ? "invalid argument"
          : code == LAUNCH_FAILED ? "unspecified launch failure"
                                  : nullptr;
  return OK;
}
int cuDeviceGet(int* device, int ordinal) {
  FAIL_IF_ASKED;
  *device = ordinal;
  return ordinal == 0 ? OK : NO_DEVICE;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  FAIL_IF_ASKED;
  *value = attribute == 75 ? capability() / 10 : attribute == 76 ? capability() % 10 : attribute == 16 ? 3 : 0;
  return OK;
}
int cuStreamIsCapturing(void*, int* state) {
  FAIL_IF_ASKED;
  *state = 0;
  return OK;
}
int cuDeviceGetName(char* name, int length, int) {
  FAIL_IF_ASKED;
  snprintf(name, length, "emulated");
  return OK;
}
int cuDriverGetVersion(int* version) {
  FAIL_IF_ASKED;
  *version = 13000;
  return OK;
}
int cuDevicePrimaryCtxRetain(void** made, int) {
  FAIL_IF_ASKED;
  *made = &context;
  return OK;
}
int cuCtxPushCurrent_v2(void* pushed) {
  FAIL_IF_ASKED;
  if (pushed != &context) return BAD_CONTEXT;
  depth++;
  return OK;
}
int cuCtxPopCurrent_v2(void** popped) {
  if (depth == 0) return BAD_CONTEXT;
  depth--;
  *popped = &context;
  return OK;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  FAIL_IF_ASKED;
  *mode = 0;
  return OK;
}
int cuModuleLoadData(void** made, const void* image) {
  FAIL_IF_ASKED;
  if (depth != 1) return BAD_CONTEXT;
  const auto* bytes = (const unsigned char*)image;
  if (memcmp(bytes, "\177ELF", 4)) return BAD_IMAGE;
  // From the ELF header: the machine, and where the section headers end, which is the file's end.
  uint16_t machine, entry_size, entries;
  uint64_t sections;
  uint32_t flags;
  memcpy(&machine, bytes + 18, 2);
  memcpy(&sections, bytes + 40, 8);
  memcpy(&flags, bytes + 48, 4);
  memcpy(&entry_size, bytes + 58, 2);
  memcpy(&entries, bytes + 60, 2);
  const std::string whole((const char*)image, sections + (uint64_t)entry_size * entries);
  if (machine == 190) {  // CUDA; the architecture is in the low byte of the flags or, of late, in the next
    if ((flags & 255) != (unsigned)capability() && (flags >> 8 & 255) != (unsigned)capability()) return NO_BINARY;
    *made = new Module{nullptr, whole};
    return OK;
  }
  char path[] = "/tmp/kernel-XXXXXX";
  const int file = mkstemp(path);
  const bool written = write(file, whole.data(), whole.size()) == (ssize_t)whole.size();
  close(file);
  void* library = written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (!library) fprintf(stderr, "emulator: %s\n", dlerror());
  unlink(path);
  if (!library) return BAD_IMAGE;
  ((void (*)(Emulator*))dlsym(library, "lend"))(&lent);
  *made = new Module{library, ""};
  return OK;
}
int cuModuleGetFunction(void** made, void* module, const char* name) {
  FAIL_IF_ASKED;
  const auto* m = (const Module*)module;
  const std::string symbol = name;
  if (!m->library) {
    if (m->image.find(".text." + symbol) == std::string::npos) return NOT_FOUND;
    *made = new Kernel{symbol, nullptr, 0};
    return OK;
  }
  auto thread = (void (*)(void**))dlsym(m->library, (symbol + "_thread").c_str());
  auto size = (const unsigned*)dlsym(m->library, (symbol + "_threads").c_str());
  if (!thread || !size) return NOT_FOUND;
  *made = new Kernel{symbol, thread, *size};
  return OK;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int threads, size_t) {
  FAIL_IF_ASKED;
  *blocks = 2048 / threads;
  return OK;
}
int cuLaunchKernel(void* function, unsigned grid_x, unsigned, unsigned, unsigned block_x, unsigned, unsigned, unsigned,
                   void* stream, void** arguments, void**) {
  FAIL_IF_ASKED;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  if (depth != 1 || stream) return BAD_CONTEXT;
  const auto* kernel = (const Kernel*)function;
  if (const char* log = getenv("MOCK_LOG")) {
    FILE* f = fopen(log, "a");
    fprintf(f, "%s %u %u\n", kernel->name.c_str(), grid_x, block_x);
    fclose(f);
  }
  if (!kernel->thread) return OK;
  if (block_x != kernel->threads || grid_x == 0) return INVALID;
  return run(grid_x, block_x, [&] { kernel->thread(arguments); }) ? OK : LAUNCH_FAILED;
}
}
