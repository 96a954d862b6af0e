// Operators as Python callables: like those of torch.ops, but faster for ordinary arguments.
//
// torch.ops looks the operator up by its name, packs the arguments into a tuple and a dictionary, and reads the schema for
// each. Here all of that happens once, when the callable is made. Calls with unusual arguments go to torch's own callable.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <cstddef>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

// The kinds of arguments that the fast path supports: a tensor that is not a subclass, a float, either of them or None, an int, a bool.
enum class Kind { kTensor, kOptionalTensor, kFloat, kOptionalFloat, kInt, kBool, kOther };

struct Parameter {
  Kind kind;
  std::optional<c10::IValue> default_value;
};

struct Call {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* general;  // torch's own callable of the same operator
  c10::OperatorHandle op;
  std::vector<Parameter> parameters;
};

Kind expected_kind(const c10::Argument& argument) {
  switch (argument.type()->kind()) {
    case c10::TypeKind::TensorType: return Kind::kTensor;
    case c10::TypeKind::OptionalType: {
      const c10::Type& of = *argument.type()->expectRef<c10::OptionalType>().getElementType();
      return of == *c10::TensorType::get() ? Kind::kOptionalTensor : of == *c10::FloatType::get() ? Kind::kOptionalFloat : Kind::kOther;
    }
    case c10::TypeKind::FloatType: return Kind::kFloat;
    case c10::TypeKind::IntType: return Kind::kInt;
    case c10::TypeKind::BoolType: return Kind::kBool;
    default: return Kind::kOther;
  }
}

// Puts the value on the stack; false if the call is left to torch.
bool push(torch::jit::Stack& stack, Kind kind, PyObject* value) {
  switch (kind) {
    case Kind::kOptionalTensor:
      if (value == Py_None) {
        stack.emplace_back();
        return true;
      }
      [[fallthrough]];
    case Kind::kTensor:
      if (!THPVariable_CheckTypeExact(Py_TYPE(value))) return false;
      stack.emplace_back(THPVariable_Unpack(value));
      return true;
    case Kind::kOptionalFloat:
      if (value == Py_None) {
        stack.emplace_back();
        return true;
      }
      [[fallthrough]];
    case Kind::kFloat:
      if (!PyFloat_CheckExact(value)) return false;
      stack.emplace_back(PyFloat_AS_DOUBLE(value));
      return true;
    case Kind::kInt: {
      if (!PyLong_CheckExact(value)) return false;
      int overflow = 0;
      const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
      if (overflow != 0) return false;
      stack.emplace_back(static_cast<int64_t>(number));
      return true;
    }
    case Kind::kBool:
      if (!PyBool_Check(value)) return false;
      stack.emplace_back(value == Py_True);
      return true;
    case Kind::kOther: return false;
  }
  return false;
}

bool fill(torch::jit::Stack& stack, const std::vector<Parameter>& parameters, PyObject* const* values, size_t given) {
  if (given > parameters.size()) return false;
  stack.reserve(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (i < given) {
      if (!push(stack, parameters[i].kind, values[i])) return false;
    } else if (parameters[i].default_value) {
      stack.push_back(*parameters[i].default_value);
    } else {
      return false;
    }
  }
  return true;
}

PyObject* wrap(const torch::jit::Stack& results) {
  if (results.size() == 1) return THPVariable_Wrap(results[0].toTensor());
  PyObject* const tuple = PyTuple_New(static_cast<Py_ssize_t>(results.size()));
  if (tuple == nullptr) return nullptr;
  for (size_t i = 0; i < results.size(); ++i) {
    PyObject* const tensor = THPVariable_Wrap(results[i].toTensor());
    if (tensor == nullptr) {
      Py_DECREF(tuple);
      return nullptr;
    }
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), tensor);
  }
  return tuple;
}

// Releases the GIL while the operator runs, as torch's own calls do.
class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_(PyEval_SaveThread()) {}
  ~WithoutInterpreter() { PyEval_RestoreThread(state_); }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  PyThreadState* const state_;
};

PyObject* call(PyObject* self, PyObject* const* values, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  auto* const made = reinterpret_cast<Call*>(self);
  torch::jit::Stack stack;
  const bool watched = at::impl::torch_function_mode_enabled() || torch::jit::tracer::isTracing();
  if (names != nullptr || watched || !fill(stack, made->parameters, values, PyVectorcall_NARGS(flags))) {
    return PyObject_Vectorcall(made->general, values, flags, names);
  }
  {
    const WithoutInterpreter none;
    made->op.callBoxed(stack);
  }
  return wrap(stack);
  END_HANDLE_TH_ERRORS
}

void destroy(PyObject* self) {
  auto* const made = reinterpret_cast<Call*>(self);
  PyTypeObject* const type = Py_TYPE(self);
  Py_XDECREF(made->general);
  made->op.~OperatorHandle();
  made->parameters.~vector();
  PyObject_Free(self);
  Py_DECREF(type);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Call, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(&destroy)},
    {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec = {
    "custom_ops_autograd.Call", sizeof(Call), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots,
};

PyTypeObject* type = nullptr;

PyObject* operator_call(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const char *name = nullptr, *overload = nullptr;
  PyObject* general = nullptr;
  if (!PyArg_ParseTuple(arguments, "ssO", &name, &overload, &general)) return nullptr;
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  std::vector<Parameter> parameters;
  for (const c10::Argument& argument : op.schema().arguments()) {
    parameters.push_back({argument.kwarg_only() ? Kind::kOther : expected_kind(argument), argument.default_value()});
  }
  auto* const made = PyObject_New(Call, type);
  if (made == nullptr) return nullptr;
  made->vectorcall = &call;
  made->general = Py_NewRef(general);
  new (&made->op) c10::OperatorHandle(op);
  new (&made->parameters) std::vector<Parameter>(std::move(parameters));
  return reinterpret_cast<PyObject*>(made);
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"operator_call", operator_call, METH_VARARGS,
     "operator_call(name, overload, general): the operator as a callable; `general` takes the calls that are out of the ordinary."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "custom_ops_autograd", "Derivatives and calls of the operators, for one torch.", -1, methods, nullptr, nullptr, nullptr,
    nullptr,
};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_custom_ops_autograd() {
  type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type == nullptr ? nullptr : PyModule_Create(&definition);
}
