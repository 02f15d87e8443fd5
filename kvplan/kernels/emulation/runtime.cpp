// Runs CUDA kernels that shim.hpp let a C++ compiler build: a program of launches over one set of buffers.
//
// Reads the program from standard input, runs it, writes outputs or the one error to standard output (the format is
// what program.py packs and unpacks). Each CUDA thread is a fiber; one block runs at a time, and a thread runs until it
// waits: for its block at a barrier, for its lanes at a warp collective. So a run is the same every time.
//
// What is wrong ends the program with a message that names the thread and the line: an access out of bounds or out of
// line, a barrier that some threads do not reach or reach elsewhere, a collective with a lane missing, no progress.
//
// With AddressSanitizer (KV_SANITIZER_ADDRESS) bounds are left to it. With ThreadSanitizer (KV_SANITIZER_THREAD) each
// CUDA thread is a thread to it, and only barriers and __syncwarp order them. This file is built without their
// instrumentation: only the kernel's own accesses count.

#include "shim.hpp"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#ifdef KV_SANITIZER_ADDRESS
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef KV_SANITIZER_THREAD
#include <sanitizer/tsan_interface.h>
#endif

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

// ---- Fibers: a stack and where it stopped -------------------------------------------------------------------------

#if defined(KV_UCONTEXT)
#include <ucontext.h>
#elif defined(__x86_64__)
// System V: what a call must keep, pushed; the rest is lost at a call anyway.
asm(R"(
.text
.globl kv_switch_stack
.type kv_switch_stack,@function
kv_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kv_switch_stack,.-kv_switch_stack
)");
static const int kSavedWords = 6;
static const int kReturnWord = 6;
#elif defined(__aarch64__)
// AAPCS64: x19-x30 and the low halves of v8-v15.
asm(R"(
.text
.globl kv_switch_stack
.type kv_switch_stack,%function
kv_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size kv_switch_stack,.-kv_switch_stack
)");
static const int kSavedWords = 20;
static const int kReturnWord = 11;  // x30
#else
#include <ucontext.h>
#define KV_UCONTEXT
#endif

#ifndef KV_UCONTEXT
extern "C" void kv_switch_stack(void** kept, void* taken);
#endif

namespace kv_emulation {
namespace {

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

struct Fiber {
#ifdef KV_UCONTEXT
  ucontext_t context;
#else
  void* stack_pointer = nullptr;
#endif
  char* stack = nullptr;  // null for the stack that the process came with
  size_t stack_bytes = 0;
#ifdef KV_SANITIZER_ADDRESS
  void* fake_stack = nullptr;
#endif
#ifdef KV_SANITIZER_THREAD
  void* tsan = nullptr;
#endif
};

const size_t kStackBytes = 256 << 10;
const size_t kGuardBytes = 16 << 10;  // no less than a page, on every machine that has these compilers

void make_fiber(Fiber& fiber, void (*entry)()) {
  char* memory = static_cast<char*>(mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (memory == MAP_FAILED) fail("no memory for the stack of a thread");
  mprotect(memory, kGuardBytes, PROT_NONE);
  fiber.stack = memory + kGuardBytes;
  fiber.stack_bytes = kStackBytes;
#ifdef KV_UCONTEXT
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
#else
  // Laid out as the switch leaves a stack: what it restores, then where it returns to. On x86-64 a function finds the
  // stack 8 bytes off a multiple of 16, since the call pushed its return address.
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes) - 8 - kSavedWords;
  memset(top, 0, (kSavedWords + 8) * sizeof(void*));
  top[kReturnWord] = reinterpret_cast<void*>(entry);
  fiber.stack_pointer = top;
#endif
#ifdef KV_SANITIZER_THREAD
  fiber.tsan = __tsan_create_fiber(0);
#endif
}

void switch_fiber(Fiber& from, Fiber& to) {
#ifdef KV_SANITIZER_ADDRESS
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
#endif
#ifdef KV_SANITIZER_THREAD
  __tsan_switch_to_fiber(to.tsan, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef KV_UCONTEXT
  swapcontext(&from.context, &to.context);
#else
  kv_switch_stack(&from.stack_pointer, to.stack_pointer);
#endif
#ifdef KV_SANITIZER_ADDRESS
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

// What ThreadSanitizer takes for order between threads; nothing in other builds.
void release_tag(void* tag) {
#ifdef KV_SANITIZER_THREAD
  __tsan_release(tag);
#else
  (void)tag;
#endif
}
void acquire_tag(void* tag) {
#ifdef KV_SANITIZER_THREAD
  __tsan_acquire(tag);
#else
  (void)tag;
#endif
}

// ---- The program ------------------------------------------------------------------------------------------------------

const size_t kCanaryBytes = 256;  // before and after each buffer; also the alignment that a GPU's allocator gives
const unsigned char kCanary = 0xa5;
#ifdef KV_SANITIZER_ADDRESS
const size_t kMargin = 0, kSharedCanaryBytes = 0;  // its red zones begin at the first byte beyond
#else
const size_t kMargin = kCanaryBytes, kSharedCanaryBytes = kCanaryBytes;
#endif

struct Buffer {
  std::string name;
  char* data = nullptr;
  size_t bytes = 0;
  bool writable = false;
  char* memory = nullptr;
};

struct Launch {
  std::string kernel;
  uint3 grid, block;
  size_t shared_bytes;
  std::vector<char> arguments;
};

enum Order : unsigned { kForward, kReverse, kShuffled };

std::vector<Buffer> buffers;
std::vector<Launch> launches;
Order order;
uint64_t random_state;
bool log_traffic;

uint64_t random_word() {  // splitmix64
  uint64_t z = (random_state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

void arrange(std::vector<unsigned>& numbers) {  // 0, 1, 2, ... as the order asks
  for (size_t i = 0; i < numbers.size(); ++i)
    numbers[i] = static_cast<unsigned>(order == kReverse ? numbers.size() - 1 - i : i);
  if (order == kShuffled)
    for (size_t i = numbers.size(); i > 1; --i) std::swap(numbers[i - 1], numbers[random_word() % i]);
}

// ---- Threads of a block -------------------------------------------------------------------------------------------------

enum class State { kReady, kBarrier, kCollective, kDone };

struct Thread : Place {
  Fiber fiber;
  unsigned rank = 0;  // in the block
  State state = State::kDone;
  // What a waiting thread waits at and with.
  Site site{"", 0};
  Collective kind = Collective::kSyncwarp;
  int barrier = 0;
  unsigned barrier_threads = 0, mask = 0;
  uint64_t value = 0;
  int operand = 0, width = 32;
  float d[4];
  unsigned a[4], b[2];
  // How often each line loaded or stored; only with a traffic log.
  std::vector<std::pair<int, unsigned>> occurrences;
};

std::vector<Thread>* threads;  // of the block that runs
std::vector<unsigned> turn_order;
size_t turn;
unsigned num_done;
Fiber main_fiber;
const Launch* launch;
unsigned block_number;

const int kBarriers = 16;  // of a block; __syncthreads is number 0
struct Barrier {
  unsigned num_waiting, generation;
};
Barrier barriers[kBarriers];

struct Tags {  // of one block, for ThreadSanitizer: two of each kind in turn, so that who is already at the next
               // barrier hides nothing of who is still before this one
  char barrier[kBarriers][2];
  char warp[32][2];
};
std::vector<Tags> tags;
char start_tag, end_tag;
unsigned warp_generation[32];

Thread& self() { return *static_cast<Thread*>(current); }

const char* kind_name(Collective kind) {
  static const char* const names[] = {"__syncwarp",       "__shfl_sync",   "__shfl_xor_sync", "__shfl_up_sync",
                                      "__shfl_down_sync", "__ballot_sync", "__any_sync",      "__all_sync",
                                      "mma"};
  return names[static_cast<int>(kind)];
}

std::string place_name(const Site& site) {
  const char* slash = strrchr(site.file, '/');
  return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

std::string thread_name(const Thread& thread) {
  char text[160];
  snprintf(text, sizeof text, "thread (%u,%u,%u) (warp %u, lane %u)", thread.thread.x, thread.thread.y, thread.thread.z,
           thread.rank / 32, thread.rank % 32);
  return text;
}

std::string wait_name(const Thread& thread) {
  if (thread.state == State::kDone) return thread_name(thread) + " has returned";
  if (thread.state == State::kBarrier)
    return thread_name(thread) + " waits at " +
           (thread.barrier == 0 ? "__syncthreads" : "barrier " + std::to_string(thread.barrier)) + ", " +
           place_name(thread.site);
  if (thread.state == State::kCollective)
    return thread_name(thread) + " waits at " + kind_name(thread.kind) + ", " + place_name(thread.site);
  return thread_name(thread) + " has not come there yet";
}

// ---- Traffic ----------------------------------------------------------------------------------------------------------

struct Access {
  uint64_t address;
  unsigned warp, occurrence;  // warp: over all blocks of the launch
  int line;
  uint16_t buffer;
  uint8_t bytes, store;
};

struct TrafficRow {  // one line of the source and one buffer
  unsigned launch, buffer;
  int line;
  unsigned store;
  uint64_t requests, lane_bytes, useful_bytes, sectors;
};

struct DistinctRow {
  unsigned launch, buffer, store, unused;
  uint64_t sectors;
};

std::vector<Access> accesses;
std::vector<TrafficRow> traffic_rows;
std::vector<DistinctRow> distinct_rows;

const uint64_t kSectorBytes = 32;

void log_access(const Buffer& buffer, const void* address, size_t bytes, bool store, const Site& site) {
  Thread& thread = self();
  const int key = store ? -site.line : site.line;
  auto entry = std::find_if(thread.occurrences.begin(), thread.occurrences.end(),
                            [&](const std::pair<int, unsigned>& one) { return one.first == key; });
  if (entry == thread.occurrences.end()) entry = thread.occurrences.insert(entry, {key, 0});
  const unsigned warps = (static_cast<unsigned>(threads->size()) + 31) / 32;
  accesses.push_back({reinterpret_cast<uint64_t>(address), block_number * warps + thread.rank / 32, entry->second++,
                      site.line, static_cast<uint16_t>(&buffer - buffers.data()), static_cast<uint8_t>(bytes), store});
}

void add_request(const Access* first, const Access* last, TrafficRow& row) {
  std::vector<std::pair<uint64_t, uint64_t>> spans;
  for (const Access* one = first; one != last; ++one) {
    spans.push_back({one->address, one->address + one->bytes});
    row.lane_bytes += one->bytes;
  }
  std::sort(spans.begin(), spans.end());
  uint64_t end = 0, next_sector = 0;  // how far bytes and sectors are counted
  for (const auto& span : spans) {
    if (span.second > end) row.useful_bytes += span.second - std::max(span.first, end);
    end = std::max(end, span.second);
    const uint64_t low = std::max(span.first / kSectorBytes, next_sector);
    const uint64_t high = (span.second - 1) / kSectorBytes + 1;
    if (high > low) row.sectors += high - low;
    next_sector = std::max(next_sector, high);
  }
  row.requests += 1;
}

void fold_traffic(unsigned launch_number) {
  auto key = [](const Access& one) { return std::make_tuple(one.buffer, one.store, one.line, one.warp, one.occurrence); };
  std::sort(accesses.begin(), accesses.end(), [&](const Access& x, const Access& y) { return key(x) < key(y); });
  for (size_t first = 0, last; first < accesses.size(); first = last) {
    for (last = first + 1; last < accesses.size() && key(accesses[last]) == key(accesses[first]);) ++last;
    const Access& one = accesses[first];
    if (traffic_rows.empty() || traffic_rows.back().launch != launch_number || traffic_rows.back().buffer != one.buffer ||
        traffic_rows.back().line != one.line || traffic_rows.back().store != one.store)
      traffic_rows.push_back({launch_number, one.buffer, one.line, one.store, 0, 0, 0, 0});
    add_request(&accesses[first], &accesses[first] + (last - first), traffic_rows.back());
  }
  for (size_t first = 0, last; first < accesses.size(); first = last) {
    std::vector<uint64_t> sectors;
    for (last = first; last < accesses.size() && accesses[last].buffer == accesses[first].buffer &&
                       accesses[last].store == accesses[first].store;
         ++last)
      for (uint64_t s = accesses[last].address / kSectorBytes;
           s <= (accesses[last].address + accesses[last].bytes - 1) / kSectorBytes; ++s)
        sectors.push_back(s);
    std::sort(sectors.begin(), sectors.end());
    const uint64_t distinct = static_cast<uint64_t>(std::unique(sectors.begin(), sectors.end()) - sectors.begin());
    distinct_rows.push_back({launch_number, accesses[first].buffer, accesses[first].store, 0, distinct});
  }
  accesses.clear();
}

// ---- The answer ---------------------------------------------------------------------------------------------------------

void write_all(const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = write(STDOUT_FILENO, at, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) _exit(4);
    at += written;
    bytes -= static_cast<size_t>(written);
  }
}

void write_number(uint64_t number) { write_all(&number, sizeof number); }

const uint64_t kOk = 0, kError = 1;

void answer_error(const std::string& message) {
  write_number(kError);
  write_number(message.size());
  write_all(message.data(), message.size());
}

// Where the program is, for a message: kernel, block and thread, if one runs.
std::string where() {
  std::string text;
  if (launch != nullptr) {
    char block[96];
    snprintf(block, sizeof block, ", block (%u,%u,%u)", block_index.x, block_index.y, block_index.z);
    text += launch->kernel + block;
  }
  if (current != nullptr) text += ", " + thread_name(self());
  return text.empty() ? "before the first launch" : text;
}

[[noreturn]] void fail(const char* format, ...) {
  char text[1024];
  va_list rest;
  va_start(rest, format);
  vsnprintf(text, sizeof text, format, rest);
  va_end(rest);
  answer_error(where() + ": " + text);
  _exit(0);
}

void on_signal(int number) {
  const char* what = number == SIGVTALRM ? "the time limit is over (a loop that does not end?)"
                     : number == SIGFPE  ? "a whole number was divided by zero"
                                         : "memory was touched that belongs to nobody, or the stack was too small";
  const std::string last = current != nullptr && self().site.line ? "; last seen at " + place_name(self().site) : "";
  answer_error(where() + ": " + what + last);
  _exit(0);
}

void watch_signals(uint64_t limit_s) {
  static char stack[64 << 10];
  stack_t alternative = {};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof stack;
  sigaltstack(&alternative, nullptr);
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_ONSTACK;
  sigaction(SIGVTALRM, &action, nullptr);
#if !defined(KV_SANITIZER_ADDRESS) && !defined(KV_SANITIZER_THREAD)
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(number, &action, nullptr);
#endif
  struct itimerval timer = {};
  timer.it_value.tv_sec = static_cast<time_t>(limit_s);
  setitimer(ITIMER_VIRTUAL, &timer, nullptr);
}

// ---- Scheduling ---------------------------------------------------------------------------------------------------------

[[noreturn]] void fail_stuck() {
  for (const Thread& thread : *threads)
    if (thread.state == State::kCollective)
      for (unsigned lane = 0; lane < 32; ++lane) {
        const unsigned rank = thread.rank / 32 * 32 + lane;
        if (!(thread.mask >> lane & 1) || rank == thread.rank) continue;
        if (rank >= threads->size())
          fail("missing lane: %s for lane %u, which the block does not have", wait_name(thread).c_str(), lane);
        const Thread& other = (*threads)[rank];
        if (other.state != State::kCollective || other.mask != thread.mask || other.kind != thread.kind ||
            other.site.line != thread.site.line)
          fail("missing lane: %s for lane %u, but %s", wait_name(thread).c_str(), lane, wait_name(other).c_str());
      }
  for (const Thread& thread : *threads)
    if (thread.state == State::kBarrier)
      for (const Thread& other : *threads)
        if (other.state != State::kBarrier || other.barrier != thread.barrier)
          fail("divergent barrier: %s, but %s", wait_name(thread).c_str(), wait_name(other).c_str());
  fail("no thread can go on");
}

// The next thread that can run, or null when the block is done.
Thread* next_thread() {
  for (size_t tried = 0; tried <= turn_order.size(); ++tried) {
    if (turn == turn_order.size()) {
      turn = 0;
      if (order == kShuffled) arrange(turn_order);
    }
    Thread& thread = (*threads)[turn_order[turn++]];
    if (thread.state == State::kReady) return &thread;
  }
  // A new shuffle may pass over the one that is ready.
  for (Thread& thread : *threads)
    if (thread.state == State::kReady) return &thread;
  if (num_done == threads->size()) return nullptr;
  fail_stuck();
}

// Lets others run; comes back when this thread is made ready and its turn comes.
void give_way() {
  Thread& me = self();
  Thread* const next = next_thread();
  if (next == &me) return;
  current = next;
  switch_fiber(me.fiber, next != nullptr ? next->fiber : main_fiber);
}

Kernel* first_kernel;
const Kernel* kernel_of_launch;

// What every fiber runs: the kernel, once for each block that is given to it.
void thread_main() {
#ifdef KV_SANITIZER_ADDRESS
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (main_fiber.stack == nullptr) {  // the first to run was switched to from there
    main_fiber.stack = static_cast<char*>(const_cast<void*>(bottom));
    main_fiber.stack_bytes = bytes;
  }
#endif
  for (;;) {
    acquire_tag(&start_tag);
    kernel_of_launch->run(kernel_of_launch->function, launch->arguments.data());
    release_tag(&end_tag);
    self().state = State::kDone;
    ++num_done;
    give_way();
  }
}

void start_block(std::vector<Thread>& block_threads) {
  threads = &block_threads;
  num_done = 0;
  memset(barriers, 0, sizeof barriers);
  memset(warp_generation, 0, sizeof warp_generation);
  for (Thread& thread : block_threads) {
    thread.state = State::kReady;
    thread.site = {"", 0};
    thread.occurrences.clear();
  }
  arrange(turn_order);
  turn = 0;
  Thread* const first = next_thread();
  current = first;
  switch_fiber(main_fiber, first->fiber);
}

std::vector<Thread> make_threads() {
  const uint3 shape = launch->block;
  std::vector<Thread> made(size_t(shape.x) * shape.y * shape.z);
  for (unsigned rank = 0; rank < made.size(); ++rank) {
    Thread& thread = made[rank];
    thread.rank = rank;
    thread.thread = {rank % shape.x, rank / shape.x % shape.y, rank / shape.x / shape.y};
    make_fiber(thread.fiber, thread_main);
  }
  return made;
}

void drop_threads(std::vector<Thread>& dropped) {
  for (Thread& thread : dropped) {
#ifdef KV_SANITIZER_THREAD
    __tsan_destroy_fiber(thread.fiber.tsan);
#endif
    munmap(thread.fiber.stack - kGuardBytes, kGuardBytes + kStackBytes);
  }
}

// Shared memory, with a canary behind it that AddressSanitizer does not need.
unsigned char* allocate_shared(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 256, bytes + kSharedCanaryBytes) != 0) fail("no memory for %zu bytes of shared memory", bytes);
  return static_cast<unsigned char*>(memory);
}

// Fills it with NaN in every format (all bits set), so that what is read before it is written shows.
void poison_shared(unsigned char* memory, size_t bytes) {
  memset(memory, 0xff, bytes);
  memset(memory + bytes, kCanary, kSharedCanaryBytes);
}

void check_shared(const unsigned char* memory, size_t bytes) {
  for (size_t i = 0; i < kSharedCanaryBytes; ++i)
    if (memory[bytes + i] != kCanary) fail("more shared memory was written than the %zu bytes of the launch", bytes);
}

void run_launch(unsigned number) {
  launch = &launches[number];
  kernel_of_launch = first_kernel;
  while (kernel_of_launch != nullptr && launch->kernel != kernel_of_launch->name) kernel_of_launch = kernel_of_launch->next;
  if (kernel_of_launch == nullptr) fail("there is no kernel of this name");
  if (kernel_of_launch->argument_bytes != launch->arguments.size())
    fail("the kernel takes %zu bytes of arguments, not %zu", kernel_of_launch->argument_bytes, launch->arguments.size());
  grid_shape = launch->grid;
  block_shape = launch->block;
  const size_t num_blocks = size_t(grid_shape.x) * grid_shape.y * grid_shape.z;
  const size_t num_threads = size_t(block_shape.x) * block_shape.y * block_shape.z;
  if (num_threads == 0 || num_threads > 1024) fail("a block has 1 to 1024 threads, not %zu", num_threads);
  turn_order.resize(num_threads);
#ifdef KV_SANITIZER_THREAD
  // Nothing orders blocks, so each has its own shared memory, and neighbours have other threads.
  const size_t num_sets = std::max<size_t>(1, std::min<size_t>(num_blocks, 512 / num_threads));
  const size_t num_shared = num_blocks;
#else
  const size_t num_sets = 1, num_shared = 1;
#endif
  tags.assign(num_blocks, Tags());
  std::vector<std::vector<Thread>> sets;
  for (size_t i = 0; i < num_sets; ++i) sets.push_back(make_threads());
  std::vector<unsigned char*> shared;
  for (size_t i = 0; i < num_shared; ++i) shared.push_back(allocate_shared(launch->shared_bytes));
  std::vector<unsigned> blocks(num_blocks);
  arrange(blocks);
  for (size_t i = 0; i < num_blocks; ++i) {
    block_number = blocks[i];
    block_index = {block_number % grid_shape.x, block_number / grid_shape.x % grid_shape.y,
                   block_number / grid_shape.x / grid_shape.y};
    shared_memory = shared[i % num_shared];
    poison_shared(shared_memory, launch->shared_bytes);
    release_tag(&start_tag);  // what this process's own thread wrote; of other blocks it knows nothing
    start_block(sets[i % num_sets]);
    check_shared(shared_memory, launch->shared_bytes);
  }
  acquire_tag(&end_tag);
  for (unsigned char* memory : shared) free(memory);
  for (std::vector<Thread>& set : sets) drop_threads(set);
  if (log_traffic) fold_traffic(number);
  launch = nullptr;
}

// ---- Warp collectives ---------------------------------------------------------------------------------------------------

float from_bf16(unsigned bits) { return __uint_as_float((bits & 0xffff) << 16); }

float from_f16(unsigned bits) {
  const unsigned sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
  if (exponent == 0x1f) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(fraction) * 0x1p-24f;
  return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
}

// D += A B over 16 x 8 x 16. PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": with g = lane / 4 and
// t = lane % 4, register r of A holds row g + 8 (r % 2), columns 2t + 8 (r / 2) and the next; register r of B rows
// 2t + 8r and the next, column g; register r of C and D row g + 8 (r / 2), column 2t + r % 2. The low half comes first.
void multiply(Thread* lanes, bool bf16) {
  float a[16][16], b[16][8], sum[16][8] = {};
  const auto unpack = [bf16](unsigned bits) { return bf16 ? from_bf16(bits) : from_f16(bits); };
  for (unsigned lane = 0; lane < 32; ++lane) {
    const unsigned g = lane / 4, t = lane % 4;
    for (unsigned r = 0; r < 4; ++r)
      for (unsigned half = 0; half < 2; ++half)
        a[g + 8 * (r % 2)][2 * t + 8 * (r / 2) + half] = unpack(lanes[lane].a[r] >> 16 * half & 0xffff);
    for (unsigned r = 0; r < 2; ++r)
      for (unsigned half = 0; half < 2; ++half)
        b[2 * t + 8 * r + half][g] = unpack(lanes[lane].b[r] >> 16 * half & 0xffff);
  }
  for (unsigned k = 0; k < 16; ++k)
    for (unsigned i = 0; i < 16; ++i)
      for (unsigned j = 0; j < 8; ++j) sum[i][j] += a[i][k] * b[k][j];
  for (unsigned lane = 0; lane < 32; ++lane)
    for (unsigned r = 0; r < 4; ++r) lanes[lane].d[r] += sum[lane / 4 + 8 * (r / 2)][2 * (lane % 4) + r % 2];
}

// The lane that a lane of a shuffle takes its value from. PTX ISA, shfl.sync: segments of `width` lanes; what lies
// outside the segment gives the lane's own value, but for the plain shuffle, which wraps round.
unsigned source_lane(const Thread& thread, unsigned lane) {
  const unsigned width = static_cast<unsigned>(thread.width), base = lane / width * width;
  const unsigned by = static_cast<unsigned>(thread.operand);
  switch (thread.kind) {
    case Collective::kShuffle: return base + by % width;
    case Collective::kShuffleXor: return (lane ^ by) < base + width ? lane ^ by : lane;
    case Collective::kShuffleUp: return lane - base >= by ? lane - by : lane;
    default: return lane + by < base + width ? lane + by : lane;
  }
}

void shuffle_lanes(Thread* lanes, unsigned mask) {
  uint64_t taken[32];
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const unsigned source = source_lane(lanes[lane], lane);
    if (!(mask >> source & 1))
      fail("%s takes the value of lane %u, which is not in the mask %08x: %s, %s", thread_name(lanes[lane]).c_str(), source,
           mask, kind_name(lanes[lane].kind), place_name(lanes[lane].site).c_str());
    taken[lane] = lanes[source].value;
  }
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) lanes[lane].value = taken[lane];
}

void vote(Thread* lanes, unsigned mask, Collective kind) {
  unsigned ballot = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) ballot |= static_cast<unsigned>(lanes[lane].value != 0) << lane;
  const uint64_t value = kind == Collective::kBallot ? ballot : kind == Collective::kAny ? ballot != 0 : ballot == mask;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) lanes[lane].value = value;
}

void complete(Thread* lanes, unsigned mask, Collective kind, bool bf16) {
  switch (kind) {
    case Collective::kSyncwarp: break;
    case Collective::kBallot:
    case Collective::kAny:
    case Collective::kAll: vote(lanes, mask, kind); break;
    case Collective::kMma: multiply(lanes, bf16); break;
    default: shuffle_lanes(lanes, mask);
  }
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) lanes[lane].state = State::kReady;
}

// Waits for the lanes of the mask; the last to come does the work for all.
void meet(Thread& me, bool bf16) {
  const unsigned lane = me.rank % 32;
  Thread* const lanes = &(*threads)[me.rank - lane];
  const unsigned present = std::min<unsigned>(32, static_cast<unsigned>(threads->size()) - (me.rank - lane));
  if (!(me.mask >> lane & 1))
    fail("%s is not in the mask %08x that it gives to %s, %s", thread_name(me).c_str(), me.mask, kind_name(me.kind),
         place_name(me.site).c_str());
  me.state = State::kCollective;
  bool all = present == 32 || me.mask >> present == 0;
  for (unsigned other = 0; other < present; ++other) {
    if (!(me.mask >> other & 1)) continue;
    const Thread& thread = lanes[other];
    if (thread.state == State::kDone) fail_stuck();
    if (thread.state != State::kCollective || thread.mask != me.mask) {
      all = false;
    } else if (thread.kind != me.kind || thread.site.line != me.site.line) {
      fail("lanes of one mask wait at different places: %s, but %s", wait_name(me).c_str(), wait_name(thread).c_str());
    }
  }
  if (all) {
    complete(lanes, me.mask, me.kind, bf16);
  } else {
    give_way();
  }
}

}  // namespace

// ---- What the shim calls --------------------------------------------------------------------------------------------

Place* current;
uint3 block_index, block_shape, grid_shape;
unsigned char* shared_memory;

Kernel::Kernel(const char* its_name, const void* its_function, size_t its_bytes, Run its_run)
    : name(its_name), function(its_function), argument_bytes(its_bytes), run(its_run), next(first_kernel) {
  first_kernel = this;
}

void wait_at_barrier(int number, unsigned num_threads, Site site) {
  Thread& me = self();
  if (number < 0 || number >= kBarriers) fail("a block has barriers 0 to 15, not %d, %s", number, place_name(site).c_str());
  if (num_threads == 0) num_threads = static_cast<unsigned>(threads->size());
  if (num_threads > threads->size() || (num_threads % 32 != 0 && num_threads != threads->size()))
    fail("a barrier takes whole warps of the block, not %u threads, %s", num_threads, place_name(site).c_str());
  me.state = State::kBarrier;
  me.barrier = number;
  me.barrier_threads = num_threads;
  me.site = site;
  for (const Thread& other : *threads) {
    if (other.state == State::kDone && num_threads == threads->size())
      fail("divergent barrier: %s, but %s", wait_name(me).c_str(), wait_name(other).c_str());
    if (other.state != State::kBarrier || other.barrier != number) continue;
    if (other.site.line != site.line || other.site.file != site.file || other.barrier_threads != num_threads)
      fail("mismatched barriers: %s, but %s", wait_name(me).c_str(), wait_name(other).c_str());
  }
  Barrier& barrier = barriers[number];
  char* const tag = &tags[block_number].barrier[number][barrier.generation % 2];
  release_tag(tag);
  if (++barrier.num_waiting == num_threads) {
    barrier.num_waiting = 0;
    ++barrier.generation;
    for (Thread& thread : *threads)
      if (thread.state == State::kBarrier && thread.barrier == number) thread.state = State::kReady;
  } else {
    give_way();
  }
  acquire_tag(tag);
}

uint64_t warp_collective(Collective kind, unsigned mask, uint64_t value, int operand, int width, Site site) {
  Thread& me = self();
  me.kind = kind;
  me.mask = mask;
  me.value = value;
  me.operand = operand;
  me.width = width;
  me.site = site;
  if (kind == Collective::kSyncwarp) {
    const unsigned warp = me.rank / 32;
    char* const tag = &tags[block_number].warp[warp][warp_generation[warp] % 2];
    release_tag(tag);
    const unsigned generation = warp_generation[warp];
    meet(me, false);
    if (warp_generation[warp] == generation) ++warp_generation[warp];  // the last to come goes on first
    acquire_tag(tag);
  } else {
    meet(me, false);
  }
  return me.value;
}

void warp_mma(float* d, const unsigned* a, const unsigned* b, bool bf16, Site site) {
  Thread& me = self();
  me.kind = Collective::kMma;
  me.mask = 0xffffffffu;
  me.site = site;
  memcpy(me.d, d, sizeof me.d);
  memcpy(me.a, a, sizeof me.a);
  memcpy(me.b, b, sizeof me.b);
  meet(me, bf16);
  memcpy(d, me.d, sizeof me.d);
}

void touch(const void* address, size_t bytes, bool store, Site site) {
  self().site = site;
  const uint64_t at = reinterpret_cast<uint64_t>(address);
  const char* const verb = store ? "a store" : "a load";
  if (at % bytes != 0)
    fail("%s of %zu bytes at an address that is not a multiple of %zu, %s", verb, bytes, bytes, place_name(site).c_str());
  for (const Buffer& buffer : buffers) {
    const uint64_t start = reinterpret_cast<uint64_t>(buffer.data);
    if (at + bytes <= start || at >= start + buffer.bytes) continue;
    if (at < start || at + bytes > start + buffer.bytes) break;
    if (store && !buffer.writable) fail("a store into %s, which is read only, %s", buffer.name.c_str(), place_name(site).c_str());
    if (log_traffic) log_access(buffer, address, bytes, store, site);
    return;
  }
#ifndef KV_SANITIZER_ADDRESS
  const Buffer* near = nullptr;
  uint64_t distance = UINT64_MAX;
  for (const Buffer& buffer : buffers) {
    const uint64_t start = reinterpret_cast<uint64_t>(buffer.data), end = start + buffer.bytes;
    const uint64_t off = at >= end ? at - end : start - at;
    if (off < distance) distance = off, near = &buffer;
  }
  if (near == nullptr) fail("%s at %p, without any buffer, %s", verb, address, place_name(site).c_str());
  fail("out of bounds: %s of %zu bytes at byte %lld of %s, which has %zu, %s", verb, bytes,
       static_cast<long long>(at - reinterpret_cast<uint64_t>(near->data)), near->name.c_str(), near->bytes,
       place_name(site).c_str());
#endif
}

// ---- Reading the program ------------------------------------------------------------------------------------------------

namespace {

void read_all(void* data, size_t bytes) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = read(STDIN_FILENO, at, bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) fail("the program ends in its middle");
    at += got;
    bytes -= static_cast<size_t>(got);
  }
}

uint64_t read_number() {
  uint64_t number;
  read_all(&number, sizeof number);
  return number;
}

std::string read_text() {
  std::string text(read_number(), '\0');
  read_all(&text[0], text.size());
  return text;
}

uint3 read_shape() {
  const uint64_t x = read_number(), y = read_number(), z = read_number();
  return {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)};
}

void read_buffer(Buffer& buffer) {
  buffer.name = read_text();
  buffer.writable = read_number() != 0;
  buffer.bytes = read_number();
  void* memory = nullptr;
  if (posix_memalign(&memory, 256, buffer.bytes + 2 * kMargin) != 0) fail("no memory for %s", buffer.name.c_str());
  buffer.memory = static_cast<char*>(memory);
  buffer.data = buffer.memory + kMargin;
  memset(buffer.memory, kCanary, kMargin);
  memset(buffer.data + buffer.bytes, kCanary, kMargin);
  read_all(buffer.data, buffer.bytes);
}

void read_launch(Launch& read) {
  read.kernel = read_text();
  read.grid = read_shape();
  read.block = read_shape();
  read.shared_bytes = read_number();
  read.arguments.resize(read_number());
  read_all(read.arguments.data(), read.arguments.size());
  for (uint64_t left = read_number(); left > 0; --left) {
    const uint64_t at = read_number(), buffer = read_number(), back = read_number();
    const uint64_t address = reinterpret_cast<uint64_t>(buffers[buffer].data) - back;
    memcpy(&read.arguments[at], &address, sizeof address);
  }
}

uint64_t read_program() {
  const uint64_t limit_s = read_number();
  order = static_cast<Order>(read_number());
  random_state = read_number();
  log_traffic = read_number() != 0;
  buffers.resize(read_number());
  for (Buffer& buffer : buffers) read_buffer(buffer);
  for (uint64_t left = read_number(); left > 0; --left) {  // arrays that hold addresses
    const uint64_t table = read_number(), at = read_number(), buffer = read_number();
    memcpy(buffers[table].data + at, &buffers[buffer].data, sizeof(char*));
  }
  launches.resize(read_number());
  for (Launch& one : launches) read_launch(one);
  return limit_s;
}

void check_canaries() {
  for (const Buffer& buffer : buffers)
    for (size_t i = 0; i < kMargin; ++i)
      if (static_cast<unsigned char>(buffer.memory[i]) != kCanary ||
          static_cast<unsigned char>(buffer.data[buffer.bytes + i]) != kCanary)
        fail("the memory beside %s was written", buffer.name.c_str());
}

void answer() {
  write_number(kOk);
  for (const Buffer& buffer : buffers)
    if (buffer.writable) write_all(buffer.data, buffer.bytes);
  write_number(traffic_rows.size());
  write_all(traffic_rows.data(), traffic_rows.size() * sizeof(TrafficRow));
  write_number(distinct_rows.size());
  write_all(distinct_rows.data(), distinct_rows.size() * sizeof(DistinctRow));
}

}  // namespace
}  // namespace kv_emulation

#ifdef KV_SANITIZER_ADDRESS
extern "C" const char* __asan_default_options() { return "detect_leaks=0:exitcode=66"; }
extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1:halt_on_error=1:exitcode=66"; }
#endif
#ifdef KV_SANITIZER_THREAD
extern "C" const char* __tsan_default_options() { return "report_thread_leaks=0:atexit_sleep_ms=0:exitcode=66:history_size=7"; }
#endif

int main() {
  using namespace kv_emulation;
#ifdef KV_SANITIZER_THREAD
  main_fiber.tsan = __tsan_get_current_fiber();
#endif
  watch_signals(read_program());
  for (unsigned i = 0; i < launches.size(); ++i) run_launch(i);
  check_canaries();
  answer();
  return 0;
}
