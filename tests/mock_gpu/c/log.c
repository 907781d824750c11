/* The log: a line for each launch, product, copy, event and collective, and for whatever was wrong.

   MOCK_GPU_LOG names the file, to which all processes append whole lines; without it only what is wrong is written, to
   standard error. */
#include "mock.h"

#include <fcntl.h>
#include <stdarg.h>
#include <unistd.h>

static int descriptor = -1;
static bool to_file;
static volatile int enabled = 1;

static void write_line(const char *format, va_list arguments)
{
    char line[4096];
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    if (length >= (int)sizeof line - 1)
        length = sizeof line - 2;
    line[length++] = '\n';
    if (write(descriptor, line, length) < 0)
        abort();
}

__attribute__((constructor)) static void open_log(void)
{
    const char *path = getenv("MOCK_GPU_LOG");
    to_file = path != NULL;
    descriptor = to_file ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : STDERR_FILENO;
}

void mock_log(const char *format, ...)
{
    if (!enabled || !to_file)
        return;
    va_list arguments;
    va_start(arguments, format);
    write_line(format, arguments);
    va_end(arguments);
}

void mock_report(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    write_line(format, arguments);
    va_end(arguments);
}

int mock_unmodelled(const char *function, int error)
{
    mock_report("UNMODELLED %s", function);
    return error;
}

/* For tests: ctypes calls these. */

void mock_gpu_logging(int on)
{
    enabled = on;
}

void mock_gpu_mark(const char *text)
{
    mock_log("mark %s", text);
}
