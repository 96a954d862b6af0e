// The Python module `_C`, written by hand against CPython's limited API: one file for every Python from 3.11 on.
//
// Importing it loads the library that it is linked into, whose static constructors register the operators: that is all
// that a module of operators is needed for. `add_one` shows what a function of it looks like without pybind11.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

// The plain function, which is also exported: ctypes, cffi or another language calls it without Python's types.
extern "C" __attribute__((visibility("default"))) long long add_one(long long value) { return value + 1; }

static PyObject* add_one_python(PyObject*, PyObject* argument) {
  const long long value = PyLong_AsLongLong(argument);  // raises TypeError or OverflowError, and then returns -1
  if (value == -1 && PyErr_Occurred()) return nullptr;
  return PyLong_FromLongLong(add_one(value));
}

static PyMethodDef methods[] = {
    {"add_one", add_one_python, METH_O, "add_one(value: int) -> int: value + 1, as a C function of 64 bits."},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_C", "Importing this module registers torch.ops.custom_ops.", -1, methods, nullptr, nullptr, nullptr, nullptr,
};

// Python looks for PyInit_ and the last part of the name that is imported, whatever the file is called.
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() { return PyModule_Create(&definition); }
