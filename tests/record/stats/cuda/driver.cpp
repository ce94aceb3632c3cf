// libcuda.so.1 on a machine without a GPU: the functions that `stats.cuda.program` calls, with the driver's rules. A module
// is the path of kernels that host.cpp was compiled to, and a launch runs them before it returns.

#include <dlfcn.h>

#include <mutex>
#include <vector>

enum { SUCCESS, INVALID_VALUE, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NOT_FOUND = 500 };
constexpr int DEVICES = 2;
constexpr unsigned THREADS = 512;  // of a block, as kernels.cu is compiled for a device

struct Context {
    int device;
    bool retained;
};
struct Module {
    Context* context;
    void* library;
};
struct Function {
    Module* module;
    void* code;
};

static Context contexts[DEVICES] = {{0, false}, {1, false}};
static thread_local std::vector<Context*> pushed;
static struct {
    int fails, modules, device;
    void* stream;
} seen;

static std::mutex one_at_a_time;  // host.cpp has the threads of one block

static Context* current() { return pushed.empty() ? nullptr : pushed.back(); }

extern "C" {
int cuGetErrorString(int error, const char** text)
{
    *text = error == INVALID_CONTEXT ? "invalid device context"
            : error == INVALID_IMAGE ? "device kernel image is invalid"
                                     : "an error of the driver";
    return SUCCESS;
}

int cuDeviceGet(int* device, int ordinal)
{
    *device = ordinal;
    return ordinal < DEVICES ? SUCCESS : INVALID_DEVICE;
}

int cuDevicePrimaryCtxRetain(Context** context, int device)
{
    *context = &contexts[device];
    contexts[device].retained = true;
    return SUCCESS;
}

int cuCtxPushCurrent_v2(Context* context)
{
    if (!context || !context->retained)
        return INVALID_CONTEXT;
    pushed.push_back(context);
    return SUCCESS;
}

int cuCtxPopCurrent_v2(Context** context)
{
    if (!current())
        return INVALID_CONTEXT;
    *context = current();
    pushed.pop_back();
    return SUCCESS;
}

int cuModuleLoadData(Module** module, const char* path)
{
    if (!current())
        return INVALID_CONTEXT;
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return INVALID_IMAGE;
    seen.modules++;
    *module = new Module{current(), library};
    return SUCCESS;
}

int cuModuleGetFunction(Function** function, Module* module, const char* name)
{
    void* code = dlsym(module->library, name);
    if (!code)
        return NOT_FOUND;
    *function = new Function{module, code};
    return SUCCESS;
}

int cuLaunchKernel(Function* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned shared, void* stream, void** arguments, void** extra)
{
    if (seen.fails)
        return seen.fails;
    if (!current() || current() != function->module->context)
        return INVALID_CONTEXT;
    if (!x || y != 1 || z != 1 || threads != THREADS || threads_y != 1 || threads_z != 1 || shared || extra)
        return INVALID_VALUE;
    std::lock_guard held(one_at_a_time);
    seen.device = current()->device;
    seen.stream = stream;
    auto launch = (void (*)(void*, unsigned, const void*, double*))dlsym(function->module->library, "launch");
    launch(function->code, x, *(const void**)arguments[0], *(double**)arguments[1]);
    return SUCCESS;
}

// For tests: the contexts on this thread's stack; what the last launch used; the error that launches return from now on.
int stub_depth() { return (int)pushed.size(); }
int stub_device() { return seen.device; }
long stub_stream() { return (long)seen.stream; }
int stub_modules() { return seen.modules; }
void stub_fail(int error) { seen.fails = error; }
}
