// Calls of CUDA's driver from one or two threads, without Python in between: host.py compiles and uses it.
#include <pthread.h>
#include <stdint.h>
#include <time.h>

typedef int (*Launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
typedef int (*OfContext)(void*);
typedef int (*Record)(void*, void*);

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Seconds that `count` launches of one block take the host; negative: the driver's error.
double launch_many(Launch launch, void* function, void* stream, void** params, int count) {
  const double begin = now();
  for (int i = 0; i < count; ++i) {
    const int code = launch(function, 1, 1, 1, 32, 1, 1, 0, stream, params, 0);
    if (code) return -code;
  }
  return now() - begin;
}

double record_many(Record record, void* event, void* stream, int count) {
  const double begin = now();
  for (int i = 0; i < count; ++i) {
    const int code = record(event, stream);
    if (code) return -code;
  }
  return now() - begin;
}

// Of a launch and a wait for it.
double round_trips(Launch launch, OfContext wait, void* function, void* stream, void** params, int count) {
  const double begin = now();
  for (int i = 0; i < count; ++i) {
    int code = launch(function, 1, 1, 1, 32, 1, 1, 0, stream, params, 0);
    if (!code) code = wait(stream);
    if (code) return -code;
  }
  return now() - begin;
}

struct Half {
  Launch launch;
  OfContext enter;
  void *context, *function, *stream, **params;
  int count;
  double seconds;
};

static void* half(void* of) {
  struct Half* h = of;
  const int code = h->enter(h->context);
  h->seconds = code ? -code : launch_many(h->launch, h->function, h->stream, h->params, h->count);
  return 0;
}

// The slower of two threads that launch `count` each, into `a` and `b` (which may be one stream).
double launch_by_two(Launch launch, OfContext enter, void* context, void* function, void* a, void* b, void** params, int count) {
  struct Half halves[2] = {{launch, enter, context, function, a, params, count, 0}, {launch, enter, context, function, b, params, count, 0}};
  pthread_t other;
  if (pthread_create(&other, 0, half, &halves[1])) return -1;
  half(&halves[0]);
  pthread_join(other, 0);
  for (int i = 0; i < 2; ++i)
    if (halves[i].seconds < 0) return halves[i].seconds;
  return halves[0].seconds > halves[1].seconds ? halves[0].seconds : halves[1].seconds;
}
