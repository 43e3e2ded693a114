// Executes one dispatch of a kernel that was compiled against include/metal_stdlib.
//
// Every thread of a threadgroup is a fiber; threadgroups run one after the other. A fiber runs until it
// meets a barrier or a simdgroup operation, waits there for its fellows, and the schedule picks the next
// one. A lane of its own is stricter than the hardware, where 32 lanes move in step: that is the gate.
// The instrumented kernel announces every load and store with the line it stands on. Each is checked
// against the bound buffers and, byte pair by byte pair, against the accesses before it (see Cell).
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef _Float16 half;
enum Space { DEVICE = 1, CONSTANT = 2, THREADGROUP = 3 };
enum ReportKind { OUT_OF_BOUNDS, RACE, UNINITIALISED, DIVERGENCE, MISALIGNED, READ_ONLY, ENDLESS };
enum Flags { MEM_DEVICE = 1, MEM_THREADGROUP = 2 };
enum Op : uint32_t { NOTHING, BARRIER, SIMD_BARRIER, SHUFFLE, REDUCE, MULTIPLY, MATRIX_MEMORY };
static const uint32_t SIMD = 32, MAX_THREADS = 1024;

extern "C" {
// ---- shared with src/launch.rs: same fields, same order -----------------------------------------
struct Counters {
  uint64_t mma, mma_half_a, mma_half_b, shuffles, reductions, simdgroup_barriers, ordering_simdgroup_barriers, barriers;
  uint64_t transcendentals, fp, conversions, mask_calls, score_calls, row_calls;
  uint64_t device_read, device_write, device_unique, constant_read, threadgroup_read, threadgroup_write;
  uint64_t threadgroups, threads, switches;
  uint64_t read_of[32], written_of[32];
};
struct Report { uint32_t kind, space, line, other_line, thread, other_thread, group, op, reached, expected, write, binding; int64_t offset; uint64_t count; };
struct Range { uintptr_t begin, end; uint32_t memory, writable, binding; };   // one bound buffer
struct Memory { uintptr_t begin, end; uint32_t writable; };                  // one allocation, bound once or more
struct Launch {
  const Range* ranges; uint32_t range_count; const Memory* memories; uint32_t memory_count;
  uint32_t grid[3], size[3], entry, schedule, perturb_exp2, mma_order, count_unique;
  uint64_t budget;
  Counters* counters; Report* reports; uint32_t report_capacity, report_count;
};
struct emu_arguments { void* buffer[32]; uint32_t group[3], grid[3], local[3], size[3], index, lane, simdgroup; };
// ---- from the kernel's object ---------------------------------------------------------------------
struct emu_entry { const char* name; void (*run)(const emu_arguments*); };
extern const emu_entry emu_entries[];
extern const uint32_t emu_cell_shift;                       // log2 of the bytes in a shadow cell
struct emu_variable { uintptr_t begin; uint64_t bytes; };
extern const emu_variable emu_variables[];                  // threadgroup arrays, ended by a zero
extern char __start_tgmem[] __attribute__((weak)), __stop_tgmem[] __attribute__((weak));
uint64_t emu_fp, emu_conversions, emu_mask_calls, emu_score_calls, emu_row_calls;
uint32_t emu_line;
void emu_switch(void** save, void* load);
}

// Threads that accessed a cell and need no order among themselves: as simdgroups of the current barrier interval,
// and lanes when there is one simdgroup only, since a second one is ordered with nobody before a barrier.
struct Several { uint32_t group, epoch, simd_epoch, simdgroups, lanes, line; uint8_t many_groups; };
// What happened to one or two bytes. The last writer is enough (an earlier one that is unordered was
// reported when the later one wrote), but for atomic writers; `readers` are those since the last write, `atomics`
// those since the last plain one.
struct Cell {
  uint32_t write_group, write_epoch, write_simd_epoch, write_line;
  Several readers, atomics;
  uint16_t writer; uint8_t atomic;
};
// A rendezvous of one simdgroup.
struct Simdgroup {
  uint32_t all, arrived; uint32_t op[SIMD], line[SIMD];
  uint64_t in[SIMD], in2[SIMD], in3[SIMD], out[SIMD]; int32_t amount[SIMD];
};

static Launch* launch; static Counters* count;
static uint32_t threads, simdgroups, done, current, group, tg_arrived;
static uint32_t ready[SIMD], tg_wait[SIMD], tg_line[MAX_THREADS];
static Simdgroup sg[SIMD];
static void* context[MAX_THREADS]; static void* main_context; static bool stopped;
static emu_arguments arguments[MAX_THREADS];
static const size_t STACK = 128 * 1024; static char* stacks;
static const uint64_t CANARY = 0x5ca1ab1e0ddba11;
static uint64_t events;
// Epochs of happens-before: one per kind of memory, for the threadgroup and for each simdgroup. They
// advance only by a barrier that names the memory; they never go back, so cells need no clearing.
static uint32_t epoch[4], simd_epoch[4][SIMD];
// What a kernel has of a buffer is no address: its binding in the high bits, and a place in a window of its
// own, wide enough that no index leads from one buffer into another. Accesses are announced with it.
static const int WINDOW = 40; static uintptr_t window[32]; static const Range* bound[32];
static Cell* threadgroup_cells; static Cell* device_cells[32]; static uint32_t* stamps[32];

#if defined(__x86_64__)
asm(R"(
.globl emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi); movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size emu_switch,.-emu_switch
)");
static const int RETURN_AT = 6, FRAME = 8;
#elif defined(__aarch64__)
asm(R"(
.globl emu_switch
.type emu_switch,%function
emu_switch:
  sub sp,sp,#176
  stp x19,x20,[sp]; stp x21,x22,[sp,#16]; stp x23,x24,[sp,#32]; stp x25,x26,[sp,#48]
  stp x27,x28,[sp,#64]; stp x29,x30,[sp,#80]
  stp d8,d9,[sp,#96]; stp d10,d11,[sp,#112]; stp d12,d13,[sp,#128]; stp d14,d15,[sp,#144]
  mov x9,sp; str x9,[x0]; mov sp,x1
  ldp x19,x20,[sp]; ldp x21,x22,[sp,#16]; ldp x23,x24,[sp,#32]; ldp x25,x26,[sp,#48]
  ldp x27,x28,[sp,#64]; ldp x29,x30,[sp,#80]
  ldp d8,d9,[sp,#96]; ldp d10,d11,[sp,#112]; ldp d12,d13,[sp,#128]; ldp d14,d15,[sp,#144]
  add sp,sp,#176
  ret
.size emu_switch,.-emu_switch
)");
static const int RETURN_AT = 11, FRAME = 22;
#else
#error "fibers are written for x86-64 and aarch64"
#endif

static void stop() { stopped = true; void* unused; emu_switch(&unused, main_context); }
static void report(Report r) {
  r.group = group - 1; r.thread = current; r.count = 1;
  for (uint32_t i = 0; i < launch->report_count; i++) {
    Report& old = launch->reports[i];
    if (old.kind == r.kind && old.line == r.line && old.other_line == r.other_line && old.space == r.space) { old.count++; return; }
  }
  if (launch->report_count < launch->report_capacity) launch->reports[launch->report_count++] = r;
}
static void fatal(Report r) { report(r); stop(); }
static void spend() { if (++events > launch->budget) fatal({ENDLESS, 0, emu_line}); }

// ---- schedule -----------------------------------------------------------------------------------------
static int lowest(uint32_t mask) { return mask ? __builtin_ctz(mask) : -1; }
static int highest(uint32_t mask) { return mask ? 31 - __builtin_clz(mask) : -1; }
static int next_thread() {
  uint32_t g = current / SIMD, l = current % SIMD;
  if (launch->schedule == 1) {            // one simdgroup as far as it goes, from the first
    if (ready[g]) return g * SIMD + lowest(ready[g]);
    for (uint32_t i = 0; i < simdgroups; i++) if (ready[i]) return i * SIMD + lowest(ready[i]);
  } else if (launch->schedule == 2) {     // the same from the last, lanes too
    if (ready[g]) return g * SIMD + highest(ready[g]);
    for (uint32_t i = simdgroups; i-- > 0;) if (ready[i]) return i * SIMD + highest(ready[i]);
  } else {                                // round robin over all threads
    uint32_t later = l == 31 ? 0 : ready[g] & (~0u << (l + 1));
    if (later) return g * SIMD + lowest(later);
    for (uint32_t i = 1; i <= simdgroups; i++) { uint32_t h = (g + i) % simdgroups; if (ready[h]) return h * SIMD + lowest(ready[h]); }
  }
  return -1;
}
static void leave(bool finished) {
  uint32_t from = current;
  int next = next_thread();
  if (next < 0) {
    if (finished && done == threads) { void* unused; emu_switch(&unused, main_context); }
    // Nobody can move: name the operation that some wait for and others never reach.
    Report r = {DIVERGENCE, 0}; r.expected = threads;
    for (uint32_t i = 0; i < threads; i++) {
      const Simdgroup& s = sg[i / SIMD];
      bool simd = s.arrived >> (i % SIMD) & 1, barrier = tg_wait[i / SIMD] >> (i % SIMD) & 1;
      if (!simd && !barrier) continue;
      uint32_t op = simd ? s.op[i % SIMD] : (uint32_t)BARRIER, line = simd ? s.line[i % SIMD] : tg_line[i];
      if (!r.reached) { r.op = op; r.line = line; current = i; if (simd) r.expected = __builtin_popcount(s.all); }
      if (r.op == op && r.line == line) { if (op == BARRIER || i / SIMD == current / SIMD) r.reached++; }
      else if (!r.other_line) r.other_line = line;
    }
    fatal(r);
  }
  current = next; count->switches++;
  emu_switch(&context[from], context[next]);
}
static void fiber() {
  emu_entries[launch->entry].run(&arguments[current]);
  ready[current / SIMD] &= ~(1u << current % SIMD); done++;
  leave(true);
  abort();
}

// ---- barriers and simdgroup operations ------------------------------------------------------------------
static void advance(uint32_t* e, uint32_t flags) {
  if (flags & MEM_DEVICE) e[DEVICE]++;
  if (flags & MEM_THREADGROUP) e[THREADGROUP]++;
}
extern "C" void emu_threadgroup_barrier(int flags) {
  spend();
  uint32_t me = current, g = me / SIMD, bit = 1u << me % SIMD;
  tg_line[me] = emu_line; tg_wait[g] |= bit; ready[g] &= ~bit;
  if (++tg_arrived < threads) { leave(false); return; }
  for (uint32_t i = 0; i < threads; i++)
    if (tg_line[i] != tg_line[me]) { Report r = {DIVERGENCE, 0, tg_line[me], tg_line[i]}; r.op = BARRIER; r.other_thread = i; fatal(r); }
  count->barriers++; tg_arrived = 0; advance(epoch, flags);
  for (uint32_t i = 0; i < simdgroups; i++) { ready[i] = sg[i].all; tg_wait[i] = 0; }
}
// Waits until all lanes are here; true for the last one, which does the work and calls wake().
static bool meet(uint32_t op) {
  spend();
  Simdgroup& s = sg[current / SIMD]; uint32_t l = current % SIMD, bit = 1u << l;
  s.op[l] = op; s.line[l] = emu_line; s.arrived |= bit; ready[current / SIMD] &= ~bit;
  if (s.arrived != s.all) { leave(false); return false; }
  for (uint32_t i = 0; i < SIMD; i++) if (s.all >> i & 1 && (s.op[i] != op || s.line[i] != s.line[l])) {
    Report r = {DIVERGENCE, 0, s.line[l], s.line[i]}; r.op = op; r.other_thread = current / SIMD * SIMD + i; fatal(r);
  }
  return true;
}
static void wake() { Simdgroup& s = sg[current / SIMD]; s.arrived = 0; ready[current / SIMD] |= s.all; }

extern "C" void emu_simdgroup_barrier(int flags) {
  if (!meet(SIMD_BARRIER)) return;
  count->simdgroup_barriers++; if (flags) count->ordering_simdgroup_barriers++;
  uint32_t g = current / SIMD;
  if (flags & MEM_DEVICE) simd_epoch[DEVICE][g]++;
  if (flags & MEM_THREADGROUP) simd_epoch[THREADGROUP][g]++;
  wake();
}
extern "C" uint64_t emu_shuffle_by(uint64_t bits, int kind, int amount) {
  Simdgroup& s = sg[current / SIMD]; uint32_t l = current % SIMD;
  s.in[l] = bits; s.amount[l] = amount;
  if (meet(SHUFFLE)) {
    count->shuffles++;
    for (int i = 0; i < (int)SIMD; i++) {
      int from = kind == 0 ? s.amount[i] : kind == 1 ? i ^ s.amount[i] : kind == 2 ? i - s.amount[i] : i + s.amount[i];
      s.out[i] = s.in[from < 0 || from > 31 ? i : from];
    }
    wake();
  }
  return s.out[l];
}
template <class T> static T combine(T a, T b, int op) { return op == 0 ? a + b : op == 1 ? (a > b ? a : b) : (a < b ? a : b); }
template <class T> static T reduce(T x, int op) {
  Simdgroup& s = sg[current / SIMD]; uint32_t l = current % SIMD;
  s.in[l] = 0; memcpy(&s.in[l], &x, sizeof x);
  if (meet(REDUCE)) {
    count->reductions++;
    T v[SIMD]; int n = 0;
    for (uint32_t i = 0; i < SIMD; i++) if (s.all >> i & 1) memcpy(&v[n++], &s.in[i], sizeof x);
    for (; n > 1; n = (n + 1) / 2) for (int i = 0; i < n / 2; i++) { v[i] = combine(v[i], v[n - 1 - i], op); }
    for (uint32_t i = 0; i < SIMD; i++) memcpy(&s.out[i], &v[0], sizeof x);
    wake();
  }
  memcpy(&x, &s.out[l], sizeof x);
  return x;
}
extern "C" float emu_reduce_float(float x, int op) { return reduce(x, op); }
extern "C" int64_t emu_reduce_int(int64_t x, int op) { return reduce(x, op); }

// ---- 8x8 matrices: Apple's layout ---------------------------------------------------------------------
static int row_of(int l) { int q = l / 4; return (q & 4) + (l / 2) % 4; }
static int col_of(int l) { int q = l / 4; return (q & 2) * 2 + (l % 2) * 2; }
extern "C" int emu_matrix_row() { return row_of(current % SIMD); }
extern "C" int emu_matrix_col() { return col_of(current % SIMD); }
extern "C" void emu_matrix_rendezvous(int) { if (meet(MATRIX_MEMORY)) wake(); }
static void unpack(uint64_t bits, bool halves, float* to) {
  if (halves) { half h[2]; memcpy(h, &bits, 4); to[0] = (float)h[0]; to[1] = (float)h[1]; } else memcpy(to, &bits, 8);
}
extern "C" uint64_t emu_multiply_accumulate(uint64_t a, uint64_t b, uint64_t c, int halves) {
  Simdgroup& s = sg[current / SIMD]; uint32_t l = current % SIMD;
  s.in[l] = a; s.in2[l] = b; s.in3[l] = c;
  if (meet(MULTIPLY)) {
    typedef float Row __attribute__((ext_vector_type(8)));
    count->mma++; count->mma_half_a += halves & 1; count->mma_half_b += halves >> 1 & 1;
    float A[8][8]; alignas(32) float B[8][8], C[8][8];
    for (int i = 0; i < 32; i++) {
      int r = row_of(i), k = col_of(i);
      unpack(s.in[i], halves & 1, &A[r][k]); unpack(s.in2[i], halves & 2, &B[r][k]); unpack(s.in3[i], halves & 4, &C[r][k]);
    }
    for (int r = 0; r < 8; r++) {
      Row x = *(Row*)C[r];
      if (launch->mma_order == 2) {     // products first, in pairs, then the accumulator
        Row p[8]; for (int k = 0; k < 8; k++) p[k] = A[r][k] * *(Row*)B[k];
        x = x + (((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7])));
      } else for (int i = 0; i < 8; i++) {
        int k = launch->mma_order == 1 ? 7 - i : i;
        Row w; for (int j = 0; j < 8; j++) w[j] = A[r][k];
        x = __builtin_elementwise_fma(w, *(Row*)B[k], x);
      }
      *(Row*)C[r] = x;
    }
    for (int i = 0; i < 32; i++) {
      float* d = &C[row_of(i)][col_of(i)];
      if (halves & 8) { half h[2] = {(half)d[0], (half)d[1]}; s.out[i] = 0; memcpy(&s.out[i], h, 4); } else memcpy(&s.out[i], d, 8);
    }
    wake();
  }
  return s.out[l];
}

// ---- memory -----------------------------------------------------------------------------------------------
// Is an access made by `thread` then ordered before one that the current thread makes now?
static bool before(Space space, uint32_t thread, uint32_t g, uint32_t e, uint32_t se) {
  if (g != group) return space == THREADGROUP;   // threadgroups of one dispatch are never ordered
  return thread == current || e < epoch[space] || (thread / SIMD == current / SIMD && se < simd_epoch[space][current / SIMD]);
}
static void join(Space space, Several& s, uint32_t line) {
  uint32_t g = current / SIMD, lane = 1u << current % SIMD;
  if (s.group != group) { s.many_groups = s.group != 0; s.group = group; s.simdgroups = 0; }
  if (s.epoch != epoch[space]) { s.epoch = epoch[space]; s.simdgroups = 0; }
  if (s.simdgroups == 0 || (s.simdgroups == 1u << g && s.simd_epoch != simd_epoch[space][g])) {
    s.simdgroups = 1u << g; s.simd_epoch = simd_epoch[space][g]; s.lanes = lane;
  } else { s.simdgroups |= 1u << g; s.lanes |= lane; }
  s.line = line;
}
// Is one of them, other than the current thread, not ordered before an access that this one makes now?
static bool clashes(Space space, const Several& s) {
  uint32_t g = current / SIMD, lane = 1u << current % SIMD;
  if (space == DEVICE && s.group && (s.many_groups || s.group != group)) return true;
  if (s.group != group || s.epoch != epoch[space]) return false;
  return (s.simdgroups & ~(1u << g)) || (s.simdgroups && s.simd_epoch == simd_epoch[space][g] && (s.lanes & ~lane));
}
static void leave_out(Several& s) { s.group = 0; s.many_groups = 0; s.simdgroups = 0; }
static void race(Space space, bool write, uint32_t line, uint32_t other_line, uint32_t other_thread, int64_t offset, uint32_t binding) {
  Report r = {RACE, (uint32_t)space, line, other_line};
  r.write = write; r.other_thread = other_thread; r.offset = offset; r.binding = binding;
  report(r);
}
// An access against the writes before it. Atomic ones have no order that matters among themselves.
static void check_writes(Space space, const Cell& c, uint32_t line, int64_t offset, uint32_t binding, bool write, bool atomic) {
  if (atomic && c.atomic) return;
  if (c.write_group && !before(space, c.writer, c.write_group, c.write_epoch, c.write_simd_epoch))
    race(space, write, line, c.write_line, c.writer, offset, binding);
  else if (!atomic && c.atomic && clashes(space, c.atomics)) race(space, write, line, c.atomics.line, ~0u, offset, binding);
}
static void note_read(Space space, Cell& c, uint32_t line, int64_t offset, uint32_t binding) {
  if (space == THREADGROUP && c.write_group != group) { Report r = {UNINITIALISED, (uint32_t)space, line}; r.offset = offset; report(r); return; }
  check_writes(space, c, line, offset, binding, false, false);
  join(space, c.readers, line);
}
static void note_write(Space space, Cell& c, uint32_t line, int64_t offset, uint32_t binding, bool atomic) {
  check_writes(space, c, line, offset, binding, true, atomic);
  if (clashes(space, c.readers)) race(space, true, line, c.readers.line, ~0u, offset, binding);
  leave_out(c.readers);
  if (atomic) join(space, c.atomics, line); else leave_out(c.atomics);
  c.write_group = group; c.write_epoch = epoch[space]; c.write_simd_epoch = simd_epoch[space][current / SIMD]; c.write_line = line;
  c.writer = current; c.atomic = atomic;
}
enum Kind { READ, WRITE, ATOMIC };
static void shadow(Space space, Cell* cells, uintptr_t base, uintptr_t p, uint32_t size, uint32_t line, Kind kind, uint32_t binding) {
  for (uintptr_t i = (p - base) >> emu_cell_shift; i <= (p - base + size - 1) >> emu_cell_shift; i++) {
    if (kind == READ) note_read(space, cells[i], line, p - base, binding);
    else note_write(space, cells[i], line, p - base, binding, kind == ATOMIC);
  }
}
static void outside(Space space, uint32_t line, int64_t offset, uint32_t binding, Kind kind) {
  Report r = {OUT_OF_BOUNDS, (uint32_t)space, line}; r.write = kind != READ; r.offset = offset; r.binding = binding;
  fatal(r);
}
// The address that a place in a window stands for.
static uintptr_t access_device(uintptr_t place, uint32_t size, uint32_t line, Kind kind, Space space) {
  spend();
  uintptr_t b = (place >> WINDOW) - 1;
  if (b >= 32 || !bound[b]) outside(space, line, (int64_t)place, ~0u, kind);   // from no buffer at all
  const Range& r = *bound[b]; int64_t offset = (int64_t)(place - window[b]);
  if (offset < 0 || offset + size > r.end - r.begin) outside(space, line, offset, b, kind);
  uintptr_t p = r.begin + offset;
  const Memory& m = launch->memories[r.memory];
  if (kind != READ && !r.writable) { Report e = {READ_ONLY, (uint32_t)space, line}; e.binding = b; e.offset = offset; fatal(e); }
  if (space == CONSTANT) { count->constant_read += size; return p; }
  if (kind != WRITE) { count->device_read += size; count->read_of[b] += size; }
  if (kind != READ) { count->device_write += size; count->written_of[b] += size; }
  uint32_t* seen = stamps[r.memory];
  if (seen && kind != WRITE)
    for (uintptr_t i = p - m.begin; i < p - m.begin + size; i++) if (seen[i] != group) { seen[i] = group; count->device_unique++; }
  if (m.writable) shadow(DEVICE, device_cells[r.memory], m.begin, p, size, line, kind, b);
  return p;
}
static void access_threadgroup(uintptr_t p, uint32_t size, uint32_t line, Kind kind) {
  spend();
  const emu_variable* v = emu_variables;
  while (v->bytes && (p < v->begin || p + size > v->begin + v->bytes)) v++;
  if (!v->bytes) { outside(THREADGROUP, line, p - (uintptr_t)__start_tgmem, 0, kind); return; }
  if (kind != WRITE) count->threadgroup_read += size;
  if (kind != READ) count->threadgroup_write += size;
  shadow(THREADGROUP, threadgroup_cells, (uintptr_t)__start_tgmem, p, size, line, kind, 0);
}
static void check_alignment(uintptr_t p, uint32_t align, uint32_t line, uint32_t space) {
  if (p & (align - 1)) { Report r = {MISALIGNED, space, line}; r.offset = (int64_t)(p & 0xfff); r.expected = align; fatal(r); }
}
// Called by the instrumented kernel before each access: size and alignment in bytes, the kernel's line. The
// address at which to make it.
static uintptr_t announced(uintptr_t p, uint32_t size, uint32_t align, uint32_t line, uint32_t space, Kind kind) {
  uintptr_t real = p;
  if (space == THREADGROUP) access_threadgroup(p, size, line, kind); else real = access_device(p, size, line, kind, (Space)space);
  check_alignment(p, align, line, space);
  return real;
}
extern "C" uintptr_t emu_read(uintptr_t p, uint32_t size, uint32_t align, uint32_t line, uint32_t space) {
  return announced(p, size, align, line, space, READ);
}
extern "C" uintptr_t emu_write(uintptr_t p, uint32_t size, uint32_t align, uint32_t line, uint32_t space) {
  return announced(p, size, align, line, space, WRITE);
}
extern "C" uint32_t emu_atomic(uintptr_t p, int op, uint32_t value, uint32_t expected, int space) {
  check_alignment(p, 4, emu_line, space);
  // An atomic load too: it may meet other atomics in any order, but no plain write.
  if (space == THREADGROUP) access_threadgroup(p, 4, emu_line, ATOMIC); else p = access_device(p, 4, emu_line, ATOMIC, DEVICE);
  uint32_t* w = (uint32_t*)p; uint32_t old = *w; int32_t a = (int32_t)old, b = (int32_t)value;
  switch (op) {
    case 1: case 11: *w = value; break;
    case 2: *w = old + value; break;
    case 3: *w = old - value; break;
    case 4: *w = old & value; break;
    case 5: *w = old | value; break;
    case 6: *w = old ^ value; break;
    case 7: *w = old < value ? old : value; break;
    case 8: *w = old > value ? old : value; break;
    case 9: *w = a < b ? old : value; break;
    case 10: *w = a > b ? old : value; break;
    case 12: if (old == expected) *w = value; break;
  }
  return old;
}

// ---- functions of the math unit -----------------------------------------------------------------------------
static float moved(float x, float in) {   // by -2..2 units in the last place, the same for equal inputs
  if (!launch->perturb_exp2 || !(x > 1e-30f) || x > 1e30f) return x;
  uint32_t bits, h; memcpy(&bits, &x, 4); memcpy(&h, &in, 4);
  h = (h ^ launch->perturb_exp2) * 2654435761u; h ^= h >> 15;
  bits += (int)(h % 5) - 2; memcpy(&x, &bits, 4);
  return x;
}
extern "C" float emu_math(float x, int f) {
  count->transcendentals++;
  switch (f) {
    case 0: return moved(expf(x), x);
    case 1: return moved(exp2f(x), x);
    case 2: return logf(x);
    case 3: return log2f(x);
    case 4: return sinf(x);
    case 5: return cosf(x);
    case 6: return tanf(x);
    case 7: return tanhf(x);
    case 8: return sinhf(x);
    case 9: return coshf(x);
    case 10: return asinf(x);
    case 11: return acosf(x);
    case 12: return atanf(x);
    case 13: return asinhf(x);
    case 14: return acoshf(x);
    case 15: return atanhf(x);
    case 16: return moved(powf(10.0f, x), x);
    default: return log10f(x);
  }
}
extern "C" float emu_math2(float x, float y, int f) { count->transcendentals++; return f == 18 ? powf(x, y) : f == 19 ? atan2f(x, y) : fmodf(x, y); }

// ---- one dispatch ---------------------------------------------------------------------------------------------
static void run_group(uint32_t x, uint32_t y, uint32_t z) {
  group++; count->threadgroups++; count->threads += threads; done = tg_arrived = 0;
  for (int i = 0; i < 4; i++) epoch[i]++;
  size_t shared = __stop_tgmem - __start_tgmem;
  if (shared) memset(__start_tgmem, 0xff, shared);       // NaN for half and float
  for (uint32_t g = 0; g < simdgroups; g++) {
    uint32_t n = threads - g * SIMD < SIMD ? threads - g * SIMD : SIMD;
    ready[g] = sg[g].all = n == 32 ? ~0u : (1u << n) - 1; sg[g].arrived = 0; tg_wait[g] = 0;
  }
  for (uint32_t i = 0; i < threads; i++) {
    uint32_t at[3] = {x, y, z}; memcpy(arguments[i].group, at, sizeof at);
    void** sp = (void**)(stacks + (i + 1) * STACK - 64) - FRAME;
    memset(sp, 0, FRAME * sizeof(void*)); sp[RETURN_AT] = (void*)fiber; context[i] = sp;
  }
  current = launch->schedule == 2 ? threads - 1 : 0;
  emu_switch(&main_context, context[current]);
  for (uint32_t i = 0; i < threads; i++) if (*(uint64_t*)(stacks + i * STACK) != CANARY) abort();
}
extern "C" __attribute__((visibility("default"))) int emu_launch(Launch* l) {
  launch = l; count = l->counters; stopped = false; events = 0; l->report_count = 0; memset(count, 0, sizeof *count);
  emu_fp = emu_conversions = emu_mask_calls = emu_score_calls = emu_row_calls = 0;
  threads = l->size[0] * l->size[1] * l->size[2]; simdgroups = (threads + SIMD - 1) / SIMD;
  if (!stacks) {
    stacks = (char*)mmap(0, STACK * MAX_THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) { stacks = 0; return 1; }
    // A guard page for each would exhaust the kernel's mappings; a word that nobody may change does too.
    for (uint32_t i = 0; i < MAX_THREADS; i++) *(uint64_t*)(stacks + i * STACK) = CANARY;
    threadgroup_cells = (Cell*)calloc((__stop_tgmem - __start_tgmem) + 1, sizeof(Cell));
  }
  group = 0; memset(threadgroup_cells, 0, ((__stop_tgmem - __start_tgmem) + 1) * sizeof(Cell));
  for (uint32_t i = 0; i < l->memory_count; i++) {
    const Memory& m = l->memories[i]; size_t n = m.end - m.begin;
    device_cells[i] = m.writable ? (Cell*)calloc((n >> emu_cell_shift) + 1, sizeof(Cell)) : 0;
    stamps[i] = l->count_unique ? (uint32_t*)calloc(n + 1, sizeof(uint32_t)) : 0;
  }
  void* buffer[32] = {}; memset(bound, 0, sizeof bound);
  for (uint32_t i = 0; i < l->range_count; i++) {
    const Range& r = l->ranges[i]; uint32_t b = r.binding; bound[b] = &r;
    // Alignment is that of the memory.
    window[b] = ((uintptr_t)(b + 1) << WINDOW) + ((uintptr_t)1 << (WINDOW - 1)) + (r.begin & 4095);
    buffer[b] = (void*)window[b];
  }
  for (uint32_t i = 0; i < threads; i++) {
    emu_arguments& a = arguments[i]; memcpy(a.buffer, buffer, sizeof buffer);
    memcpy(a.grid, l->grid, sizeof a.grid); memcpy(a.size, l->size, sizeof a.size);
    a.local[0] = i % l->size[0]; a.local[1] = i / l->size[0] % l->size[1]; a.local[2] = i / l->size[0] / l->size[1];
    a.index = i; a.lane = i % SIMD; a.simdgroup = i / SIMD;
  }
  for (uint32_t z = 0; z < l->grid[2] && !stopped; z++)
    for (uint32_t y = 0; y < l->grid[1] && !stopped; y++)
      for (uint32_t x = 0; x < l->grid[0] && !stopped; x++) run_group(x, y, z);
  for (uint32_t i = 0; i < l->memory_count; i++) { free(device_cells[i]); free(stamps[i]); }
  count->fp = emu_fp; count->conversions = emu_conversions;
  count->mask_calls = emu_mask_calls; count->score_calls = emu_score_calls; count->row_calls = emu_row_calls;
  return stopped ? 2 : 0;
}
