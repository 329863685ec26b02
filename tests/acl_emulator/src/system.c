/* Devices and versions. ACL_EMULATOR_CANN ("8.3.RC1", "8.5.0", "9.1.0") is what version queries answer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emulator.h"

#define NUM_DEVICES 2

static _Thread_local int current_device = -1;

int emu_current_device(void) { return current_device; }

static const char *cann_version(void) {
    const char *given = getenv("ACL_EMULATOR_CANN");
    return given == NULL ? "9.1.0" : given;
}

aclError aclrtSetDevice(int32_t device) {
    EMU_ENTER("aclrtSetDevice");
    aclError code = ACL_SUCCESS;
    if (device < 0 || device >= NUM_DEVICES) {
        code = emu_error(ACL_ERROR_RT_PARAM_INVALID, "device %d of %d", device, NUM_DEVICES);
    } else {
        current_device = device;
    }
    return emu_done("aclrtSetDevice", code, "device=%d", device);
}

aclError aclrtGetDevice(int32_t *device) {
    EMU_ENTER("aclrtGetDevice");
    if (device == NULL || current_device < 0) {
        return emu_done("aclrtGetDevice", emu_error(ACL_ERROR_RT_CONTEXT_NULL, "no device was set"), "-");
    }
    *device = current_device;
    return emu_done("aclrtGetDevice", ACL_SUCCESS, "device=%d", current_device);
}

/* The version of the ACL interface, not of CANN. */
aclError aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch) {
    EMU_ENTER("aclrtGetVersion");
    *major = 1;
    *minor = strncmp(cann_version(), "8.", 2) == 0 ? 16 : 17;
    *patch = 0;
    return emu_done("aclrtGetVersion", ACL_SUCCESS, "-");
}

#ifndef WITHOUT_VERSION_STR
aclError aclsysGetVersionStr(char *package, char *version) {
    EMU_ENTER("aclsysGetVersionStr");
    if (package == NULL || version == NULL || strcmp(package, "runtime") != 0) {
        aclError code = emu_error(ACL_ERROR_INVALID_PARAM, "no package %s", package == NULL ? "(null)" : package);
        return emu_done("aclsysGetVersionStr", code, "-");
    }
    snprintf(version, ACL_PKG_VERSION_MAX_SIZE, "%s", cann_version());
    return emu_done("aclsysGetVersionStr", ACL_SUCCESS, "%s", package);
}
#endif

aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version) {
    EMU_ENTER("aclsysGetCANNVersion");
    if (version == NULL || name != ACL_PKG_NAME_CANN) {
        aclError code = emu_error(ACL_ERROR_INVALID_PARAM, "no package number %d", (int)name);
        return emu_done("aclsysGetCANNVersion", code, "-");
    }
    memset(version, 0, sizeof *version);
    snprintf(version->version, sizeof version->version, "%s", cann_version());
    return emu_done("aclsysGetCANNVersion", ACL_SUCCESS, "-");
}
