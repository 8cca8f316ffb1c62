/* A stand-in for libcuda.so.1 on a machine without an NVIDIA driver: enough for libcudnn to load its engines, answer heuristics
 * and finalize run-time compiled plans for a device that is only described to it. Nothing can execute. The functions listed in
 * driver_names.txt are generated next to these and answer CUDA_ERROR_NO_DEVICE, as does cuInit. */
#include <stddef.h>

enum { SUCCESS = 0, NO_DEVICE = 100 };

static int dummy;

int cuInit(unsigned flags) { return NO_DEVICE; }
int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuGetErrorName(int error, const char **text) { *text = "CUDA_ERROR_NO_DEVICE"; return SUCCESS; }
int cuGetErrorString(int error, const char **text) { *text = "stub driver of the tests: no device"; return SUCCESS; }

/* A plan loads its compiled kernel when it is finalized. A handle that is not null is all it looks at. */
int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned n, void *c, void *d, unsigned m) {
    *library = &dummy;
    return SUCCESS;
}
int cuLibraryUnload(void *library) { return SUCCESS; }
int cuLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = &dummy; return SUCCESS; }
int cuKernelSetAttribute(int attribute, int value, void *kernel, int device) { return SUCCESS; }
int cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) { *value = 0; return SUCCESS; }
int cuModuleLoadData(void **module, const void *image) { *module = &dummy; return SUCCESS; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = &dummy; return SUCCESS; }
