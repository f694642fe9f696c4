// Simulates a file system with fewer features: preloaded before all other libraries, it refuses locks, hard links and
// syncing of folders, as some network and cloud file systems do. The program takes no part.

#include <errno.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int refuse(int code) {
  errno = code;
  return -1;
}

extern "C" {

int flock(int, int) { return refuse(ENOTSUP); }

int link(const char*, const char*) { return refuse(EPERM); }

int linkat(int, const char*, int, const char*, int) { return refuse(EPERM); }

int fsync(int file) {
  struct stat about;
  if (fstat(file, &about) == 0 && S_ISDIR(about.st_mode)) return refuse(EINVAL);
  return syscall(SYS_fsync, file);
}
}
