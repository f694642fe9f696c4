// Signals that ask something of a program, kept from its first moment on until it listens to them: libtorch registers its
// operations before `main`, which takes longer than all else of a start, and whoever is asked meanwhile would be ended.

#include <signal.h>

namespace {

constexpr int SIGNALS[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2};

} // namespace

extern "C" {

// Keeps them from this thread, and from what it starts: a mask outlives fork and exec. Says which ones were kept before, a bit each.
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

// Lets all but those through to this thread: those that have come meanwhile come now.
void shim_hear_signals(unsigned kept) {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : SIGNALS)
    if ((kept >> signal & 1u) == 0) sigaddset(&signals, signal);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
}

// Run before the constructors of any library. Only a program in which these functions are called has this file in it.
#if defined(__ELF__)
static void keep_first() { shim_keep_signals(); }
__attribute__((section(".preinit_array"), used)) void (*const first)() = keep_first;
#endif

} // extern "C"
