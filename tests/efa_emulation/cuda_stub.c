/* A CUDA driver library without a device.
 *
 * NIXL's LIBFABRIC plugin links against libcuda.so.1 also where it serves Neuron
 * or host memory.  Every call fails as the real driver's do without a device.
 */
#define CUDA_ERROR_NO_DEVICE 100

int cuCtxSetCurrent(void *context)
{
    (void)context;
    return CUDA_ERROR_NO_DEVICE;
}

int cuDeviceGetPCIBusId(char *id, int size, int device)
{
    (void)device;
    if (size > 0)
        id[0] = 0;
    return CUDA_ERROR_NO_DEVICE;
}

int cuPointerGetAttributes(unsigned count, void *attributes, void **data, unsigned long long pointer)
{
    (void)count, (void)attributes, (void)data, (void)pointer;
    return CUDA_ERROR_NO_DEVICE;
}
