/* Declares structures whose fields Python knows from this declaration alone (`fabric/c_library.py`), so that no list of
   their fields exists twice. `fabric/c_library.py` finds this header for every source.

   DECLARED(Point, int64_t num; const double *x, *y;) defines the type `Point` and, for Python, the text `Point_fields`.
   Its fields may be numbers and pointers to numbers; `declared_structure` lists their types. */
#ifndef WEFT_STRUCTURES_H
#define WEFT_STRUCTURES_H

#define DECLARED(name, ...)                                                                                            \
  typedef struct {                                                                                                     \
    __VA_ARGS__                                                                                                        \
  } name;                                                                                                              \
  const char name##_fields[] = #__VA_ARGS__

#endif
