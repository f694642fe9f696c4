// Signals that ask something of a program, kept from its first moment on until it listens to them: libtorch registers its
// operations before `main`, which takes longer than all else of a start, and whoever is asked meanwhile would be ended.

#include <signal.h>

namespace {

sigset_t those() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGHUP);
  sigaddset(&signals, SIGUSR1);
  sigaddset(&signals, SIGUSR2);
  return signals;
}

} // namespace

extern "C" {

// Safe between fork and exec, and a mask outlives an exec: what we start ourselves keeps them while it is still linked.
void shim_keep_signals() {
  const sigset_t signals = those();
  sigprocmask(SIG_BLOCK, &signals, nullptr);
}

// Lets them through to this thread: those that have come meanwhile come now.
void shim_hear_signals() {
  const sigset_t signals = those();
  sigprocmask(SIG_UNBLOCK, &signals, nullptr);
}

// Run before the constructors of any library. Only a program in which these functions are called has this file in it.
#if defined(__ELF__)
__attribute__((section(".preinit_array"), used)) void (*const first)() = shim_keep_signals;
#endif

} // extern "C"
