// The Python module `_C`, written by hand against CPython's limited API: one file for every Python from 3.11 on.
//
// Importing it loads the library that contains it, whose static constructors register the operators. A module of operators
// needs nothing else. `add_one` shows a function of the module without pybind11.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

// The plain function, which is also exported: ctypes, cffi or another language can call it without Python's types.
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

// Python looks for PyInit_ followed by the last part of the imported name, whatever the file's name is.
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() { return PyModule_Create(&definition); }
