// A stand-in for RCCL and NCCL: their C interface over plain memory, between processes or threads of one machine.
//
// It keeps what makes the real libraries hard to use:
// - Transfers are queued on a stream, which executes them in order; a call returns before they are done.
// - A send completes with its receive: nothing is sent before the other side has reached the receive.
// - Transfers of one group make progress together; outside a group each is a group of its own.
// - Joining waits for every rank, without a deadline.
// - A lost peer is not detected: its transfers block until the communicator is aborted.
// - A communicator is for one thread at a time: a second thread aborts the process.
// - Reductions abort the process.
//
// Beyond the interface: hostStreamCreate, -Destroy, -Mark and -Passed, which stand for a device's runtime library. If
// the stand-in for a GPU is loaded (kernels/device/standin), its streams are used. It is informed what a group reads
// and writes, and when it begins and ends.
// For the tests, STANDIN_FAULT has one of these, for the N-th group of rank R:
//   kill:R:N, stop:R:N   kills or halts the rank in the middle of the group, or of the next one in which it sends
//   block:R:N            ncclGroupEnd does not return until the communicator is aborted
//   wrong:R:N            the group ends in an error without moving its tensors, after a delay in which others reach it
//   soon:R:N             the same, before the call returns
//   cling:R:N            like wrong, and the device does not return even when the communicator is aborted
//   join:R:0             the rank never joins
// STANDIN_DELAY=M delays each group of each rank by up to M milliseconds, sampled by rank and group.

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Answer { kOk = 0, kSystem = 2, kInvalid = 4, kUsage = 5 };

struct Transfer {
  int peer;
  char* data;
  size_t bytes;
};

// A message is a header and, if `carries` is set, as many bytes. Without data it announces a receive of that size.
struct Header {
  uint64_t carries;
  uint64_t bytes;
};

// The state of the connection to one peer, in both directions.
struct Wire {
  int socket = -1;
  std::deque<Transfer> sends, receives;
  std::deque<uint64_t> asked; // receives announced by the other side
  std::vector<char> out; // headers to send
  const char* payload = nullptr;    // data that follows `out`
  size_t payload_left = 0;
  size_t header_got = 0;
  Header header{};
  size_t got = 0; // of the current receive
};

struct Group {
  std::vector<Transfer> sends, receives;
};

struct Comm {
  int rank = 0, world = 0;
  std::map<int, Wire> wires;
  std::atomic<int> error{kOk}, inside{0}, groups{0};
  std::atomic<bool> aborted{false};
  std::atomic<int> under_way{0};
};

struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  uint64_t came = 0, done = 0; // operations ever queued, and how many of them are done
  bool end = false;
  std::thread thread;

  Stream() : thread([this] { work(); }) {}
  ~Stream() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      end = true;
    }
    changed.notify_all();
    thread.join();
  }
  void work() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return end || !queue.empty(); });
      if (queue.empty()) return;
      auto next = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      next();
      lock.lock();
      ++done;
    }
  }
  void push(std::function<void()> work) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      queue.push_back(std::move(work));
      ++came;
    }
    changed.notify_all();
  }
  uint64_t mark() {
    std::lock_guard<std::mutex> lock(mutex);
    return came;
  }
  bool passed(uint64_t mark) {
    std::lock_guard<std::mutex> lock(mutex);
    return done >= mark;
  }
};

// Whether the tests ask for this fault now on this rank.
bool fault(const char* what, const Comm& comm, int number) {
  const char* asked = std::getenv("STANDIN_FAULT");
  const std::string mine = std::string(what) + ":" + std::to_string(comm.rank) + ":" + std::to_string(number);
  return asked != nullptr && mine == asked;
}

// Whether the tests ask for this fault in this group or in one before.
bool due(const char* what, const Comm& comm, int number) {
  for (int before = number; before >= 0; --before) {
    if (fault(what, comm, before)) return true;
  }
  return false;
}

// Sleeps if the tests ask for a delay.
void nap(const Comm& comm, int number) {
  const char* most = std::getenv("STANDIN_DELAY");
  if (most == nullptr) return;
  std::mt19937 draw(static_cast<unsigned>(comm.rank * 100003 + number));
  std::this_thread::sleep_for(std::chrono::microseconds(draw() % (1000 * std::atoi(most) + 1)));
}

// Aborts if two threads are inside.
struct Guard {
  Comm& comm;
  explicit Guard(Comm& comm) : comm(comm) {
    if (comm.inside.fetch_add(1) != 0) {
      std::fprintf(stderr, "stand-in: two threads use one communicator at a time\n");
      std::abort();
    }
  }
  ~Guard() { comm.inside.fetch_sub(1); }
};

void begin(Wire& wire, const Group& group, int peer) {
  for (const auto& send : group.sends) {
    if (send.peer == peer) wire.sends.push_back(send);
  }
  for (const auto& receive : group.receives) {
    if (receive.peer != peer) continue;
    wire.receives.push_back(receive);
    const Header ask{0, receive.bytes};
    const auto* bytes = reinterpret_cast<const char*>(&ask);
    wire.out.insert(wire.out.end(), bytes, bytes + sizeof(ask));
  }
}

// Writes as much as the socket takes. If the other side is lost, it fails silently.
void write_some(Comm& comm, Wire& wire) {
  if (wire.out.empty() && wire.payload_left == 0 && !wire.sends.empty() && !wire.asked.empty()) {
    const Transfer send = wire.sends.front();
    if (wire.asked.front() != send.bytes) comm.error = kUsage;
    wire.asked.pop_front();
    const Header header{1, send.bytes};
    const auto* bytes = reinterpret_cast<const char*>(&header);
    wire.out.insert(wire.out.end(), bytes, bytes + sizeof(header));
    wire.payload = send.data;
    wire.payload_left = send.bytes;
  }
  if (!wire.out.empty()) {
    const ssize_t sent = ::send(wire.socket, wire.out.data(), wire.out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0) wire.out.erase(wire.out.begin(), wire.out.begin() + sent);
    return;
  }
  if (wire.payload_left > 0) {
    const ssize_t sent = ::send(wire.socket, wire.payload, wire.payload_left, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent <= 0) return;
    wire.payload += sent;
    wire.payload_left -= static_cast<size_t>(sent);
    if (wire.payload_left == 0) wire.sends.pop_front();
  }
}

void read_some(Comm& comm, Wire& wire, bool& gone) {
  if (wire.header_got < sizeof(Header)) {
    auto* at = reinterpret_cast<char*>(&wire.header) + wire.header_got;
    const ssize_t got = ::recv(wire.socket, at, sizeof(Header) - wire.header_got, MSG_DONTWAIT);
    gone = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
    if (got <= 0) return;
    wire.header_got += static_cast<size_t>(got);
    if (wire.header_got < sizeof(Header)) return;
    if (wire.header.carries == 0) {
      wire.asked.push_back(wire.header.bytes);
      wire.header_got = 0;
      return;
    }
    if (wire.receives.empty() || wire.receives.front().bytes != wire.header.bytes) {
      comm.error = kUsage;
      return;
    }
  }
  Transfer& receive = wire.receives.front();
  const ssize_t got = ::recv(wire.socket, receive.data + wire.got, receive.bytes - wire.got, MSG_DONTWAIT);
  gone = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
  if (got <= 0) return;
  wire.got += static_cast<size_t>(got);
  if (wire.got < receive.bytes) return;
  wire.got = wire.header_got = 0;
  wire.receives.pop_front();
}

// Executes a group: all of its transfers together, until the last is done or the communicator is aborted.
void run(Comm& comm, const Group& group, int number) {
  const bool soon = fault("soon", comm, number);
  if (soon || fault("wrong", comm, number) || fault("cling", comm, number)) {
    // Gives compute streams the time to reach the group.
    if (!soon) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    comm.error = kSystem;
    // The kernel blocks until the communicator is aborted.
    while (!comm.aborted || fault("cling", comm, number)) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return;
  }
  nap(comm, number);
  for (auto& [peer, wire] : comm.wires) begin(wire, group, peer);
  size_t moved = 0;
  while (!comm.aborted && comm.error == kOk) {
    std::vector<pollfd> polled;
    std::vector<Wire*> wires;
    for (auto& [peer, wire] : comm.wires) {
      const bool writes = !wire.out.empty() || wire.payload_left > 0 || (!wire.sends.empty() && !wire.asked.empty());
      if (!writes && wire.sends.empty() && wire.receives.empty()) continue;
      polled.push_back({wire.socket, static_cast<short>(POLLIN | (writes ? POLLOUT : 0)), 0});
      wires.push_back(&wire);
    }
    if (wires.empty()) break;
    ::poll(polled.data(), polled.size(), 20);
    bool lost = false;
    for (size_t i = 0; i < wires.size(); ++i) {
      const size_t before = wires[i]->payload_left;
      if (polled[i].revents & POLLOUT) write_some(comm, *wires[i]);
      if (polled[i].revents & POLLIN) {
        bool gone = false;
        read_some(comm, *wires[i], gone);
        lost |= gone;
      }
      lost |= (polled[i].revents & (POLLERR | POLLHUP)) != 0;
      moved += before != wires[i]->payload_left;
    }
    if (moved > 0 && due("kill", comm, number)) ::raise(SIGKILL);
    if (moved > 0 && due("stop", comm, number)) ::raise(SIGSTOP);
    // A lost peer stays lost, unreported: without a pause this would spin.
    if (lost) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

// The stand-in for a GPU, if loaded.
struct Gpu {
  void (*launch)(void* stream, const char* name, size_t count, const void* const* data, const int* write);
  void (*begin)(void* stream);
  void (*end)(void* stream);

  template <typename F>
  static void find(F& function, const char* name) {
    function = reinterpret_cast<F>(::dlsym(RTLD_DEFAULT, name));
  }
  Gpu() {
    find(launch, "standin_launch");
    find(begin, "standin_begin");
    find(end, "standin_end");
  }
};

const Gpu* gpu() {
  static const Gpu one;
  return one.launch == nullptr ? nullptr : &one;
}

// The thread that executes a stream.
Stream* worker_of(void* stream) {
  if (gpu() == nullptr) return static_cast<Stream*>(stream);
  static std::mutex mutex;
  // Never freed: a device's stream lives as long as the process.
  static auto* const workers = new std::map<void*, Stream*>;
  const std::lock_guard<std::mutex> lock(mutex);
  Stream*& worker = (*workers)[stream];
  if (worker == nullptr) worker = new Stream;
  return worker;
}

struct Queued {
  Comm* comm;
  void* stream;
  Group group;

  // Informs the stand-in for a GPU of what is queued.
  void tell(const Gpu& gpu) const {
    std::vector<const void*> data;
    std::vector<int> write;
    const auto list = [&](const std::vector<Transfer>& transfers, int writes) {
      for (const Transfer& transfer : transfers) {
        data.push_back(transfer.data);
        write.push_back(writes);
      }
    };
    list(group.sends, 0);
    list(group.receives, 1);
    gpu.launch(stream, "ncclGroup", data.size(), data.data(), write.data());
    gpu.begin(stream);
  }
};

thread_local int depth = 0;
thread_local std::vector<Queued> queued;

Queued& in_group(Comm* comm, void* stream) {
  for (auto& one : queued) {
    if (one.comm == comm && one.stream == stream) return one;
  }
  queued.push_back({comm, stream, {}});
  return queued.back();
}

void launch() {
  for (auto& one : queued) {
    Comm& comm = *one.comm;
    ++comm.groups;
    while (fault("block", comm, comm.groups) && !comm.aborted) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    if (comm.aborted) continue;
    ++comm.under_way;
    if (fault("soon", comm, comm.groups)) comm.error = kSystem;
    if (gpu() != nullptr) one.tell(*gpu());
    worker_of(one.stream)->push([&comm, stream = one.stream, group = std::move(one.group), number = comm.groups.load()] {
      run(comm, group, number);
      if (gpu() != nullptr) gpu()->end(stream);
      --comm.under_way;
    });
  }
  queued.clear();
}

sockaddr_un address(const char* id, int rank, socklen_t& length) {
  sockaddr_un place{};
  place.sun_family = AF_UNIX;
  // The name begins with a zero byte, so the socket is in no folder.
  const int name = std::snprintf(place.sun_path + 1, sizeof(place.sun_path) - 1, "standin-%.32s-%d", id, rank);
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name);
  return place;
}

int connected(const char* id, int rank, int peer) {
  socklen_t length = 0;
  const sockaddr_un place = address(id, peer, length);
  while (true) {
    const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (::connect(socket, reinterpret_cast<const sockaddr*>(&place), length) == 0) {
      (void)!::write(socket, &rank, sizeof(rank));
      return socket;
    }
    ::close(socket);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

} // namespace

struct UniqueId {
  char bytes[128];
};

extern "C" {

int ncclGetVersion(int* version) {
  *version = 29900;
  return kOk;
}

int ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  std::memset(id->bytes, 0, sizeof(id->bytes));
  std::snprintf(id->bytes, sizeof(id->bytes), "%08x%08x%08x", random(), random(), random());
  return kOk;
}

const char* ncclGetErrorString(int answer) {
  switch (answer) {
    case kOk: return "no error";
    case kSystem: return "system error";
    case kInvalid: return "invalid argument";
    default: return "invalid usage";
  }
}

int ncclCommInitRank(void** out, int world, UniqueId id, int rank) {
  auto comm = std::make_unique<Comm>();
  comm->rank = rank;
  comm->world = world;
  while (fault("join", *comm, 0)) std::this_thread::sleep_for(std::chrono::seconds(1));
  socklen_t length = 0;
  const sockaddr_un place = address(id.bytes, rank, length);
  const int door = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (::bind(door, reinterpret_cast<const sockaddr*>(&place), length) != 0 || ::listen(door, world) != 0) return kSystem;
  for (int peer = 0; peer < rank; ++peer) comm->wires[peer].socket = connected(id.bytes, rank, peer);
  for (int peer = rank + 1; peer < world; ++peer) {
    const int socket = ::accept4(door, nullptr, nullptr, SOCK_CLOEXEC);
    int who = 0;
    if (::recv(socket, &who, sizeof(who), MSG_WAITALL) != sizeof(who)) return kSystem;
    comm->wires[who].socket = socket;
  }
  ::close(door);
  *out = comm.release();
  return kOk;
}

int ncclCommGetAsyncError(void* handle, int* error) {
  Comm& comm = *static_cast<Comm*>(handle);
  const Guard guard(comm);
  *error = comm.error;
  return kOk;
}

// Freed by neither: a concurrent call may still use it.
int ncclCommAbort(void* handle) {
  Comm& comm = *static_cast<Comm*>(handle);
  comm.aborted = true;
  while (comm.under_way > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  for (auto& [peer, wire] : comm.wires) ::close(wire.socket);
  return kOk;
}

int ncclCommDestroy(void* handle) {
  Comm& comm = *static_cast<Comm*>(handle);
  const Guard guard(comm);
  while (comm.under_way > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  for (auto& [peer, wire] : comm.wires) ::close(wire.socket);
  return kOk;
}

int ncclGroupStart() {
  ++depth;
  return kOk;
}

int ncclGroupEnd() {
  if (depth == 0) return kUsage;
  if (--depth > 0) return kOk;
  std::vector<std::unique_ptr<Guard>> guards;
  for (auto& one : queued) guards.push_back(std::make_unique<Guard>(*one.comm));
  launch();
  return kOk;
}

static int queue(const void* data, size_t count, int type, int peer, void* handle, void* stream, bool sends) {
  if (handle == nullptr || stream == nullptr || data == nullptr || type != 1) return kInvalid;
  Comm& comm = *static_cast<Comm*>(handle);
  const Guard guard(comm);
  if (peer < 0 || peer >= comm.world || peer == comm.rank) return kInvalid;
  Group& group = in_group(&comm, stream).group;
  (sends ? group.sends : group.receives).push_back({peer, static_cast<char*>(const_cast<void*>(data)), count});
  if (depth == 0) launch();
  return kOk;
}

int ncclSend(const void* data, size_t count, int type, int peer, void* handle, void* stream) {
  return queue(data, count, type, peer, handle, stream, true);
}

int ncclRecv(void* data, size_t count, int type, int peer, void* handle, void* stream) {
  return queue(data, count, type, peer, handle, stream, false);
}

// Never called on such a library: its order of summation would be its own. Calling it aborts.
#define NO_SUMS(name)                                                     \
  int name() {                                                            \
    std::fprintf(stderr, "stand-in: " #name " adds up in an order of its own\n"); \
    std::abort();                                                         \
  }
NO_SUMS(ncclAllReduce)
NO_SUMS(ncclReduce)
NO_SUMS(ncclReduceScatter)

int hostStreamCreate(void** out) {
  *out = new Stream;
  return kOk;
}

int hostStreamDestroy(void* stream) {
  delete static_cast<Stream*>(stream);
  return kOk;
}

int hostStreamMark(void* stream, uint64_t* mark) {
  *mark = static_cast<Stream*>(stream)->mark();
  return kOk;
}

int hostStreamPassed(void* stream, uint64_t mark) { return static_cast<Stream*>(stream)->passed(mark) ? 0 : 600; }

} // extern "C"
