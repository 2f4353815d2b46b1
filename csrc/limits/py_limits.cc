// The Python module `tpu_sync_rl.bench._limits`. By Python's own API: reading pybind11's headers
// would take five times as long as all else here.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cerrno>
#include <vector>

#include "limits.h"

namespace {

namespace limits = tsr::limits;

// A buffer that an argument gave, held while it is used.
struct Argument {
  Py_buffer view = {};
  ~Argument() { PyBuffer_Release(&view); }

  uint8_t* data() const { return static_cast<uint8_t*>(view.buf); }
  size_t nbytes() const { return static_cast<size_t>(view.len); }
};

// Runs `work` without the GIL; its seconds as a float, or an OSError.
template <typename Work>
PyObject* Seconds(Work work) {
  double seconds;
  Py_BEGIN_ALLOW_THREADS;
  seconds = work();
  Py_END_ALLOW_THREADS;
  if (seconds >= 0) return PyFloat_FromDouble(seconds);
  errno = static_cast<int>(-seconds);
  return PyErr_SetFromErrno(PyExc_OSError);
}

// Whether `number`, an argument, can share work.
bool IsPositive(Py_ssize_t number, const char* name) {
  if (number < 1) PyErr_Format(PyExc_ValueError, "%s is %zd", name, number);
  return number >= 1;
}

bool ParseFds(PyObject* list, std::vector<int>* fds) {
  PyObject* const items = PySequence_Fast(list, "fds is no sequence");
  if (items == nullptr) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); ++i) {
    fds->push_back(static_cast<int>(PyLong_AsLong(PySequence_Fast_GET_ITEM(items, i))));
  }
  Py_DECREF(items);
  return PyErr_Occurred() == nullptr && IsPositive(fds->size(), "the number of fds");
}

PyObject* Send(PyObject*, PyObject* arguments) {
  PyObject* list;
  Argument data;
  Py_ssize_t step;
  std::vector<int> fds;
  if (!PyArg_ParseTuple(arguments, "Oy*n", &list, &data.view, &step)) return nullptr;
  if (!ParseFds(list, &fds) || !IsPositive(step, "write_nbytes")) return nullptr;
  return Seconds([&] { return limits::Send(fds, data.data(), data.nbytes(), step); });
}

PyObject* Receive(PyObject*, PyObject* arguments) {
  PyObject* list;
  Argument data;
  Py_ssize_t step;
  std::vector<int> fds;
  if (!PyArg_ParseTuple(arguments, "Ow*n", &list, &data.view, &step)) return nullptr;
  if (!ParseFds(list, &fds) || !IsPositive(step, "read_nbytes")) return nullptr;
  return Seconds([&] { return limits::Receive(fds, data.data(), data.nbytes(), step); });
}

PyObject* Copy(PyObject*, PyObject* arguments) {
  Argument to, from;
  int num_threads, by;
  if (!PyArg_ParseTuple(arguments, "w*y*ii", &to.view, &from.view, &num_threads, &by)) {
    return nullptr;
  }
  if (!IsPositive(num_threads, "num_threads")) return nullptr;
  if (to.nbytes() != from.nbytes()) {
    PyErr_SetString(PyExc_ValueError, "the memory of both sides differs in size");
    return nullptr;
  }
  return Seconds([&] {
    const auto how = static_cast<limits::CopyBy>(by);
    return limits::Copy(to.data(), from.data(), to.nbytes(), num_threads, how);
  });
}

PyObject* ReadProcess(PyObject*, PyObject* arguments) {
  int pid, num_threads;
  unsigned long long address;
  Argument to;
  if (!PyArg_ParseTuple(arguments, "iKw*i", &pid, &address, &to.view, &num_threads)) return nullptr;
  if (!IsPositive(num_threads, "num_threads")) return nullptr;
  return Seconds(
      [&] { return limits::ReadProcess(pid, address, to.data(), to.nbytes(), num_threads); });
}

PyObject* LetOthersRead(PyObject*, PyObject*) {
  limits::LetOthersRead();
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"send", Send, METH_VARARGS, nullptr},
    {"receive", Receive, METH_VARARGS, nullptr},
    {"copy", Copy, METH_VARARGS, nullptr},
    {"read_process", ReadProcess, METH_VARARGS, nullptr},
    {"let_others_read", LetOthersRead, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "_limits",
                      "What the machine does at best, for the benchmarks.",
                      0,
                      methods,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__limits() { return PyModule_Create(&module); }
