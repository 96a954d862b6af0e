// Records the calls that one kernel makes, by stepping the calling thread through it one instruction at a time.
//
// x86-64 Linux. The thread's trap flag raises SIGTRAP after each instruction. The handler looks at the previous
// instruction (a call? a jump?) and at the stack pointer (did a function return?). It changes nothing in the stepped
// code, so C++ exceptions and returns work as always. Code that takes too long continues at full speed, unrecorded.
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define TRAP_FLAG 0x100
#define MAX_DEPTH 4096
#define MAX_FRAMES 100000
// Reference counting and type checks of the interpreter return within this budget; a Python kernel does not.
#define OUTSIDE_BUDGET 3000

typedef struct {
  uint64_t target;   // address of the function
  uint64_t entered;  // instructions executed in the kernel before it
  uint64_t left;     // instructions executed when it returned; 0 until then
  uint32_t depth;    // number of calls between the kernel and this function
  uint32_t jumped;   // 1: reached by a jump (a tail call, a stub of the linker), not by a call
} Frame;

typedef struct {
  uint64_t stack_pointer;
  uint32_t frame;
} Open;

enum State { IDLE, SEEKING, INSIDE, OUTSIDE, DONE };  // OUTSIDE: in the interpreter, which the kernel called
enum Previous { OTHER, CALL, JUMP };

static struct {
  enum State state;
  enum Previous previous;
  uint64_t instructions, steps, budget, outside_steps;
  uint32_t frames, depth, cut, outside_depth, resumed;
  Frame frame[MAX_FRAMES];
  Open open[MAX_DEPTH];
  const uint64_t *entries;  // sorted addresses at which a kernel begins
  uint64_t entry_count;
  uint64_t interpreter_low, interpreter_high;
  struct sigaction former;
  stack_t former_stack;
  void *handler_stack;
} session;

static __thread int stepping __attribute__((tls_model("initial-exec")));

static enum Previous kind_of(const uint8_t *code) {
  for (int prefix = 0; prefix < 4; prefix++, code++) {
    uint8_t byte = *code;
    int is_prefix = byte == 0x66 || byte == 0xf2 || byte == 0xf3 || byte == 0x2e || byte == 0x3e || (byte & 0xf0) == 0x40;
    if (is_prefix) continue;
    if (byte == 0xe8) return CALL;
    if (byte == 0xe9) return JUMP;
    if (byte != 0xff) return OTHER;
    int operation = (code[1] >> 3) & 7;
    return operation == 2 ? CALL : operation == 4 ? JUMP : OTHER;
  }
  return OTHER;
}

static int begins_a_kernel(uint64_t address) {
  uint64_t low = 0, high = session.entry_count;
  while (low < high) {
    uint64_t middle = (low + high) / 2;
    if (session.entries[middle] < address) low = middle + 1;
    else high = middle;
  }
  return low < session.entry_count && session.entries[low] == address;
}

static void note(uint64_t target, uint64_t stack_pointer, int jumped) {
  if (session.frames == MAX_FRAMES || session.depth == MAX_DEPTH) {
    session.cut = 1;
    return;
  }
  session.frame[session.frames] = (Frame){target, session.instructions, 0, session.depth, (uint32_t)jumped};
  if (!jumped) session.open[session.depth++] = (Open){stack_pointer, session.frames};
  session.frames++;
}

static void close_returned(uint64_t stack_pointer) {
  while (session.depth && stack_pointer > session.open[session.depth - 1].stack_pointer)
    session.frame[session.open[--session.depth].frame].left = session.instructions;
}

static void record_step(uint64_t at, uint64_t stack_pointer) {
  session.instructions++;
  if (session.previous == CALL) note(at, stack_pointer, 0);
  else if (session.previous == JUMP && stack_pointer == session.open[session.depth - 1].stack_pointer)
    note(at, stack_pointer, 1);
  int python = at >= session.interpreter_low && at < session.interpreter_high;
  if (session.previous == CALL && python) {
    session.state = OUTSIDE;
    session.outside_depth = session.depth;
    session.outside_steps = 0;
    session.resumed = 0;
  }
}

// The kernel's instructions and those around it (passing arguments, the interpreter) have a budget each.
static int over_budget(void) {
  return session.instructions > session.budget || ++session.steps - session.instructions > session.budget;
}

static void on_trap(int number, siginfo_t *info, void *context) {
  (void)number, (void)info;
  greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
  if (!stepping || session.state == IDLE || session.state == DONE || over_budget()) {
    if (stepping && (session.state == INSIDE || session.state == OUTSIDE)) session.cut = 1;
    if (stepping && session.state != IDLE) session.state = DONE;
    registers[REG_EFL] &= ~TRAP_FLAG;
    return;
  }
  uint64_t at = registers[REG_RIP], stack_pointer = registers[REG_RSP];
  if (session.state == SEEKING && session.previous == CALL && begins_a_kernel(at)) {
    session.state = INSIDE;
    note(at, stack_pointer, 0);
  } else if (session.state == INSIDE || session.state == OUTSIDE) {
    close_returned(stack_pointer);
    if (session.depth == 0) {  // the kernel has returned
      session.state = DONE;
      registers[REG_EFL] &= ~TRAP_FLAG;
      return;
    }
    if (session.state == OUTSIDE) {
      // The call that led to the interpreter has returned: this is the kernel again.
      if (session.depth < session.outside_depth) session.state = INSIDE;
      else if (!session.resumed && ++session.outside_steps > OUTSIDE_BUDGET) {
        registers[REG_EFL] &= ~TRAP_FLAG;  // until single_step_resume
        return;
      }
    }
    if (session.state == INSIDE) record_step(at, stack_pointer);
  }
  session.previous = kind_of((const uint8_t *)at);
}

static void set_trap_flag(void) {
  __asm__ volatile("pushfq\n\torq $0x100, (%%rsp)\n\tpopfq" ::: "cc", "memory");
}

// Record the next kernel that this thread enters. Returns 0, or -1 if a recording is running.
int single_step_start(const uint64_t *entries, uint64_t count, uint64_t low, uint64_t high, uint64_t budget) {
  if (session.state != IDLE) return -1;
  if (session.handler_stack == NULL) session.handler_stack = malloc(1 << 17);
  session.entries = entries, session.entry_count = count;
  session.interpreter_low = low, session.interpreter_high = high;
  session.budget = budget;
  session.instructions = session.steps = 0;
  session.frames = session.depth = session.cut = 0;
  session.previous = OTHER;
  stack_t stack = {.ss_sp = session.handler_stack, .ss_size = 1 << 17};
  sigaltstack(&stack, &session.former_stack);
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_trap;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGTRAP, &action, &session.former);
  stepping = 1;
  session.state = SEEKING;
  set_trap_flag();
  return 0;
}

// Continue recording. The interpreter, which the kernel called, is about to return to the kernel.
void single_step_resume(void) {
  if (!stepping || session.state != OUTSIDE) return;
  session.resumed = 1;
  set_trap_flag();
}

// Stop recording. Returns the number of frames.
uint32_t single_step_stop(void) {
  if (session.state == INSIDE || session.state == OUTSIDE) session.cut = 1;
  session.state = DONE;
  __asm__ volatile("nop\n\tnop\n\tnop");  // the handler clears the flag after one of them
  sigaction(SIGTRAP, &session.former, NULL);
  sigaltstack(&session.former_stack, NULL);
  stepping = 0;
  session.state = IDLE;
  return session.frames;
}

const Frame *single_step_frames(void) { return session.frame; }
uint64_t single_step_instructions(void) { return session.instructions; }
uint32_t single_step_cut(void) { return session.cut; }
