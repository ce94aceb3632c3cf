// CUDA's streams, events and current devices on a machine without CUDA, under a virtual clock.
//
// Registered as torch's own device guard and hooks for CUDA, so that autograd starts a thread for each device, makes that
// device current in it, and runs the backward of each operator on the stream of its forward, as on GPUs.
//
// The clock counts ticks. An operator takes the host one tick to launch and its stream `device_ticks` to run, so streams
// fall behind the host until something waits. Each stream, and the host, knows up to which tick every other stream is
// done; reading a tensor that is not known to be written is a race.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>

namespace {

constexpr int kMaxDevices = 8;
constexpr int64_t kQueue = 1024;  // operators that a stream queues before a launch blocks, as on CUDA
int devices = 2;
int64_t device_ticks = 3;
int64_t now_ticks = 0;
std::recursive_mutex lock;

using Key = std::pair<int, int64_t>;  // device, stream
using Knowledge = std::map<Key, int64_t>;

struct FakeStream {
  int64_t busy_until = 0;
  int64_t launched = 0;
  Knowledge known;
};
struct FakeEvent {
  int device;
  bool recorded = false;
  int64_t passes_at = 0;
  Knowledge known;
};

std::map<Key, FakeStream> streams;
Knowledge host;
int64_t next_stream = 1;
int64_t waits = 0;

thread_local int current = 0;
thread_local std::map<int, int64_t> current_streams;

void merge(Knowledge& into, const Knowledge& from) {
  for (const auto& [key, place] : from) into[key] = std::max(into[key], place);
}

int64_t stream_of(int device) {
  auto found = current_streams.find(device);
  return found == current_streams.end() ? 0 : found->second;
}

void launch(int device, int64_t stream, int64_t ticks) {
  FakeStream& on = streams[{device, stream}];
  now_ticks += 1;
  now_ticks = std::max(now_ticks, on.busy_until - kQueue * device_ticks);
  on.busy_until = std::max(now_ticks, on.busy_until) + ticks;
  merge(on.known, host);
  on.known[{device, stream}] = ++on.launched;
}

void record(FakeEvent& event, int device, int64_t stream) {
  FakeStream& on = streams[{device, stream}];
  event.device = device;
  event.recorded = true;
  event.passes_at = std::max(now_ticks, on.busy_until);
  event.known = on.known;
}

void wait_for(int64_t ticks, const Knowledge& known) {
  ++waits;
  now_ticks = std::max(now_ticks, ticks);
  merge(host, known);
}

c10::Device cuda(int index) { return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)}; }
c10::Stream unpacked(int device, int64_t stream) { return c10::Stream(c10::Stream::UNSAFE, cuda(device), stream); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = cuda(current);
    current = device.index();
    return before;
  }
  c10::Device getDevice() const override { return cuda(current); }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    int index = device.has_index() ? device.index() : current;
    return unpacked(index, stream_of(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return unpacked(device.index(), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    std::lock_guard held(lock);
    return unpacked(device.index(), next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    std::lock_guard held(lock);
    if (!*event) *event = new FakeEvent;
    ::record(*static_cast<FakeEvent*>(*event), stream.device_index(), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard held(lock);
    if (!event) return;
    auto& waits_for = *static_cast<FakeEvent*>(event);
    FakeStream& on = streams[{stream.device_index(), stream.id()}];
    on.busy_until = std::max(on.busy_until, waits_for.passes_at);
    merge(on.known, waits_for.known);
  }
  bool queryEvent(void* event) const override {
    std::lock_guard held(lock);
    return !event || static_cast<FakeEvent*>(event)->passes_at <= now_ticks;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<FakeEvent*>(event); }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard held(lock);
    return streams[{stream.device_index(), stream.id()}].busy_until <= now_ticks;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    std::lock_guard held(lock);
    auto& on = streams[{stream.device_index(), stream.id()}];
    wait_for(on.busy_until, on.known);
  }
  void synchronizeEvent(void* event) const override {
    std::lock_guard held(lock);
    if (event) wait_for(static_cast<FakeEvent*>(event)->passes_at, static_cast<FakeEvent*>(event)->known);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(devices); }
};

std::map<const char*, size_t> pinned;  // start and length

void release_pinned(void* data) {
  std::lock_guard held(lock);
  pinned.erase(static_cast<const char*>(data));
  ::free(data);
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    std::lock_guard held(lock);
    void* data = ::malloc(std::max<size_t>(size, 1));
    std::fill_n(static_cast<unsigned char*>(data), size, 0xFF);  // NaN in every format
    pinned[static_cast<const char*>(data)] = size;
    return {data, data, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};
Pinned pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard held(lock);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(data) < after->first + after->second;
}

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(devices); }
  c10::DeviceIndex current_device() const override { return static_cast<c10::DeviceIndex>(current); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  int getNumGPUs() const override { return devices; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

extern "C" {
void fake_set_up(int count, int64_t ticks) {
  devices = std::min(count, kMaxDevices);
  device_ticks = ticks;
  // torch created its hooks when it was imported, those of a build without CUDA: an object without members.
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
}
int fake_current_device() { return current; }
void fake_set_device(int device) { current = device; }
int64_t fake_new_stream() {
  std::lock_guard held(lock);
  return next_stream++;
}
int64_t fake_current_stream(int device) { return stream_of(device); }
void fake_set_stream(int device, int64_t stream) { current_streams[device] = stream; }
int64_t fake_now() {
  std::lock_guard held(lock);
  return now_ticks;
}
int64_t fake_waits() { return waits; }
// The position of the launch in its stream, and the tick at which it is done.
void fake_launch(int device, int64_t stream, int64_t* place, int64_t* done) {
  std::lock_guard held(lock);
  launch(device, stream, device_ticks);
  *place = streams[{device, stream}].launched;
  *done = streams[{device, stream}].busy_until;
}
// Whether the next operator of the first stream runs after a launch on the second.
int fake_ordered(int device, int64_t stream, int other_device, int64_t other_stream, int64_t place) {
  std::lock_guard held(lock);
  if (device == other_device && stream == other_stream) return 1;
  auto seen = [&](const Knowledge& known) {
    auto found = known.find({other_device, other_stream});
    return found != known.end() && found->second >= place;
  };
  return seen(host) || seen(streams[{device, stream}].known);
}
void fake_synchronize(int device, int64_t stream) {
  Guard().synchronizeStream(unpacked(device, stream));
}
void fake_synchronize_device(int device) {
  std::lock_guard held(lock);
  for (auto& [key, on] : streams)
    if (key.first == device) wait_for(on.busy_until, on.known);
}
int fake_stream_is_done(int device, int64_t stream) { return Guard().queryStream(unpacked(device, stream)); }
void* fake_new_event() { return new FakeEvent; }
void fake_free_event(void* event) { delete static_cast<FakeEvent*>(event); }
void fake_record(void* event, int device, int64_t stream) {
  std::lock_guard held(lock);
  record(*static_cast<FakeEvent*>(event), device, stream);
}
void fake_block(void* event, int device, int64_t stream) { Guard().block(event, unpacked(device, stream)); }
// A query advances the clock by a tick, so that polling ends.
int fake_query(void* event) {
  std::lock_guard held(lock);
  now_ticks += 1;
  auto& asked = *static_cast<FakeEvent*>(event);
  if (asked.passes_at > now_ticks) return 0;
  merge(host, asked.known);
  return 1;
}
void fake_wait(void* event) { Guard().synchronizeEvent(event); }
int64_t fake_passes_at(void* event) { return static_cast<FakeEvent*>(event)->passes_at; }
}
