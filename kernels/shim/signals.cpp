// Blocks signals from process start until the program handles them: libtorch registers its operations before `main`,
// which takes most of the startup time, and a signal during it would end the process.

#include <signal.h>

namespace {

constexpr int SIGNALS[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2};

} // namespace

extern "C" {

// Blocks them for this thread and its child processes: a mask survives fork and exec. Returns those that were blocked
// before as a bit mask.
unsigned shim_keep_signals() {
  sigset_t signals, before;
  sigemptyset(&signals);
  for (const int signal : SIGNALS) sigaddset(&signals, signal);
  pthread_sigmask(SIG_BLOCK, &signals, &before);
  unsigned kept = 0;
  for (const int signal : SIGNALS)
    if (sigismember(&before, signal) == 1) kept |= 1u << signal;
  return kept;
}

// Unblocks all but those for this thread; pending signals are delivered now.
void shim_hear_signals(unsigned kept) {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : SIGNALS)
    if ((kept >> signal & 1u) == 0) sigaddset(&signals, signal);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
}

// Runs before the constructors of any library. This file is linked only into a program that calls these functions.
#if defined(__ELF__)
static void keep_first() { shim_keep_signals(); }
__attribute__((section(".preinit_array"), used)) void (*const first)() = keep_first;
#endif

} // extern "C"
